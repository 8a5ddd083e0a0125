// What every client program is told to do, and how it says what it got: one JSON object a line.
export const task = JSON.parse(process.argv[2]);

export const text = [{ role: "user", content: task.question }];
export const image = [
  {
    role: "user",
    content: [
      { type: "image_url", image_url: { url: task.picture } },
      { type: "text", text: task.question },
    ],
  },
];
// The same, and the function, in the words of the responses API.
export const responsesImage = (url) => [
  {
    role: "user",
    content: [
      { type: "input_image", image_url: url, detail: "auto" },
      { type: "input_text", text: task.question },
    ],
  },
];
export const badPicture = task.bad_messages[0].content[0].image_url.url;
export const tool = { type: "function", function: task.function };
export const flatTool = { type: "function", ...task.function };

/** A call as all programs report it: name and arguments, parsed. */
export const called = (name, args) => [name, typeof args === "string" ? JSON.parse(args) : args];

export function report(client, values) {
  console.log(JSON.stringify({ client, ...values }));
}
