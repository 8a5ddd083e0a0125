// The official client for Node.js: plain, streamed, with its stream helper, and its responses.
import OpenAI from "openai";
import { badPicture, called, flatTool, image, report, responsesImage, task, text, tool } from "./task.mjs";

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

const calling = { tool_choice: "required", parallel_tool_calls: false };
const call = { messages: text, ...options, ...calling, max_tokens: task.max_call_tokens, tools: [tool] };
const { message } = (await client.chat.completions.create(call)).choices[0];
const made = message.tool_calls[0];
const result = { role: "tool", tool_call_id: made.id, content: "It is red." };
const after = await client.chat.completions.create({ messages: [...text, message, result], tools: [tool], ...options });
let name = null;
let args = "";
for await (const chunk of await client.chat.completions.create({ stream: true, ...call })) {
  for (const delta of chunk.choices[0].delta.tool_calls ?? []) {
    name = delta.function.name ?? name;
    args += delta.function.arguments ?? "";
  }
}
report("openai-node", {
  tool: called(made.function.name, made.function.arguments),
  tool_stream: called(name, args),
  after_tool: after.choices[0].message.content,
});
const helped = (await client.chat.completions.stream(call).finalChatCompletion()).choices[0].message.tool_calls[0];
report("openai-node .stream()", { tool_stream: called(helped.function.name, helped.function.arguments) });

const settings = { model: task.model, temperature: 0, max_output_tokens: task.max_tokens };
const seen2 = await client.responses.create({ input: responsesImage(task.picture), ...settings });
let streamed2 = "";
const events = await client.responses.create({ input: responsesImage(task.picture), stream: true, ...settings });
for await (const event of events) {
  if (event.type === "response.output_text.delta") streamed2 += event.delta;
}
report("openai-node responses", {
  text: (await client.responses.create({ input: task.question, ...settings })).output_text,
  image: seen2.output_text,
  stream: streamed2,
  prompt_tokens: seen2.usage.input_tokens,
});
try {
  await client.responses.create({ input: responsesImage(badPicture), ...settings });
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  report("openai-node responses", { error: error.message, code: error.code });
}
try {
  const failing = { input: task.question, stream: true, seed: task.broken_seed, ...settings };
  for await (const _ of await client.responses.create(failing));
} catch (error) {
  if (!(error instanceof OpenAI.APIError)) throw error;
  report("openai-node responses", { broken: error.message });
}
const flat = { input: task.question, ...settings, ...calling, max_output_tokens: task.max_call_tokens, tools: [flatTool] };
const item = (await client.responses.create(flat)).output[0];
const final2 = (await client.responses.stream(flat).finalResponse()).output[0];
const output = { type: "function_call_output", call_id: item.call_id, output: "It is red." };
const answer = await client.responses.create({
  input: [{ role: "user", content: task.question }, item, output],
  tools: [flatTool],
  ...settings,
});
report("openai-node responses", {
  tool: called(item.name, item.arguments),
  tool_stream: called(final2.name, final2.arguments),
  after_tool: answer.output_text,
});
