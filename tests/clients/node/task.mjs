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

export function report(client, values) {
  console.log(JSON.stringify({ client, ...values }));
}
