// The official client for Node.js: plain, streamed, and with its stream helper.
import OpenAI from "openai";
import { image, report, task, text } from "./task.mjs";

const client = new OpenAI({ baseURL: task.base_url, apiKey: "none", maxRetries: 0 });
const options = { model: task.model, temperature: 0, max_tokens: task.max_tokens };

const said = await client.chat.completions.create({ messages: text, ...options });
const seen = await client.chat.completions.create({ messages: image, ...options });
let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  messages: image,
  stream: true,
  stream_options: { include_usage: true },
  ...options,
});
for await (const chunk of stream) {
  for (const choice of chunk.choices) streamed += choice.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
report("openai-node", {
  text: said.choices[0].message.content,
  image: seen.choices[0].message.content,
  stream: streamed,
  prompt_tokens: usage.prompt_tokens,
  finish_reason: said.choices[0].finish_reason,
});

const helper = client.chat.completions.stream({ messages: image, ...options });
const final = await helper.finalChatCompletion();
report("openai-node .stream()", { stream: final.choices[0].message.content, role: final.choices[0].message.role });

try {
  await client.chat.completions.create({ messages: task.bad_messages, ...options });
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  report("openai-node", { error: error.message, param: error.param, code: error.code });
}

const broken = { messages: text, seed: task.broken_seed, ...options };
try {
  for await (const _ of await client.chat.completions.create({ stream: true, ...broken }));
} catch (error) {
  if (!(error instanceof OpenAI.APIError)) throw error;
  report("openai-node", { broken: error.message });
}
try {
  await client.chat.completions.stream(broken).finalChatCompletion();
} catch (error) {
  report("openai-node .stream()", { broken: error.message });
}
