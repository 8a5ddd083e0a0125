// The AI SDK with both of its providers for servers of this kind.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";
import { report, task } from "./task.mjs";

const providers = {
  "ai-sdk openai": createOpenAI({ baseURL: task.base_url, apiKey: "none" }).chat(task.model),
  "ai-sdk openai-compatible": createOpenAICompatible({
    name: "fovea",
    baseURL: task.base_url,
    includeUsage: true,
  })(task.model),
};
const look = [
  {
    role: "user",
    content: [
      { type: "image", image: task.picture },
      { type: "text", text: task.question },
    ],
  },
];

for (const [name, model] of Object.entries(providers)) {
  const options = { model, temperature: 0, maxOutputTokens: task.max_tokens, maxRetries: 0 };
  const said = await generateText({ prompt: task.question, ...options });
  const seen = await generateText({ messages: look, ...options });
  const stream = streamText({ messages: look, ...options });
  const parts = [];
  for await (const part of stream.textStream) parts.push(part);
  report(name, {
    text: said.text,
    image: seen.text,
    stream: parts.join(""),
    prompt_tokens: (await stream.usage).inputTokens,
    finish_reason: await stream.finishReason,
  });

  const bad = [{ role: "user", content: [{ type: "image", image: "aGVsbG8=", mediaType: "image/png" }] }];
  try {
    await generateText({ messages: bad, ...options });
  } catch (error) {
    if (!APICallError.isInstance(error)) throw error;
    report(name, { error: error.message, status: error.statusCode });
  }

  let broken = null;
  const failing = streamText({
    prompt: task.question,
    seed: task.broken_seed,
    ...options,
    onError: ({ error }) => {
      broken = error.message ?? String(error);
    },
  });
  for await (const _ of failing.fullStream);
  if (broken !== null) report(name, { broken });
}
