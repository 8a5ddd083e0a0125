// The AI SDK with both of its providers for servers of this kind, and with the API that is its default: responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, streamText, tool } from "ai";
import { called, report, task } from "./task.mjs";

const providers = {
  "ai-sdk openai": createOpenAI({ baseURL: task.base_url, apiKey: "none" }).chat(task.model),
  "ai-sdk openai-compatible": createOpenAICompatible({
    name: "fovea",
    baseURL: task.base_url,
    includeUsage: true,
  })(task.model),
  "ai-sdk openai responses": createOpenAI({ baseURL: task.base_url, apiKey: "none", fetch: withSeed })(task.model),
};
// This API has no seed, and so the provider sends none.
let seed = null;
function withSeed(url, init) {
  if (seed === null) return fetch(url, init);
  return fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), seed }) });
}
const { name: toolName, description, parameters } = task.function;
const tools = { [toolName]: tool({ description, inputSchema: jsonSchema(parameters) }) };
const calling = {
  tools,
  toolChoice: "required",
  maxOutputTokens: task.max_call_tokens,
  providerOptions: { openai: { parallelToolCalls: false, store: false }, fovea: { parallel_tool_calls: false } },
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

  const made = await generateText({ prompt: task.question, ...options, ...calling });
  const streamedCall = streamText({ prompt: task.question, ...options, ...calling });
  const calls = await streamedCall.toolCalls;
  const outcome = {
    role: "tool",
    content: [
      {
        type: "tool-result",
        toolCallId: made.toolCalls[0].toolCallId,
        toolName,
        output: { type: "text", value: "It is red." },
      },
    ],
  };
  const history = [{ role: "user", content: task.question }, ...made.response.messages, outcome];
  const after = await generateText({
    messages: history,
    tools,
    ...options,
    providerOptions: { openai: { store: false } },
  });
  report(name, {
    tool: called(made.toolCalls[0].toolName, made.toolCalls[0].input),
    tool_stream: called(calls[0].toolName, calls[0].input),
    after_tool: after.text,
  });

  let broken = null;
  seed = task.broken_seed;
  const failing = streamText({
    prompt: task.question,
    seed: task.broken_seed,
    ...options,
    onError: ({ error }) => {
      broken = error.message ?? String(error);
    },
  });
  for await (const _ of failing.fullStream);
  seed = null;
  if (broken !== null) report(name, { broken });
}
