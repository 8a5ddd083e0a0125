// Turns files into pictures that the server takes: smaller ones as they are, larger ones reduced here, before they travel.

// What the server decodes; anything else that this browser can read is sent as JPEG.
const ACCEPTED = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]);
// Canvases end somewhere, and no model looks closer.
const MAX_SIDE = 8192;
// Base64 makes four bytes of three; the rest of the body is text.
const BODY_SHARE = 0.7;

/** Bytes that one picture may have, so that as many as are allowed fit into one request. */
export function byteBudget(limits) {
  return Math.min(limits.max_image_bytes, Math.floor((limits.max_body_bytes * BODY_SHARE) / Math.max(1, limits.max_images)));
}

/**
 * Reads a file. Gives its name, its size in pixels and bytes as it will be sent, `dataUrl` to send, `previewUrl` to show
 * (free it with `forget`), and `isReduced`. Throws an Error for people if it is no picture.
 */
export async function readPicture(file, limits) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "The file"} is no picture that this browser can read.`);
  }
  const { width, height } = bitmap;
  const maxBytes = byteBudget(limits);
  const fits =
    ACCEPTED.has(file.type) && file.size <= maxBytes && width * height <= limits.max_image_pixels && width <= MAX_SIDE && height <= MAX_SIDE;
  const sent = fits ? { blob: file, width, height } : await reduced(bitmap, maxBytes, limits.max_image_pixels);
  bitmap.close();
  return {
    name: file.name || "picture",
    width: sent.width,
    height: sent.height,
    bytes: sent.blob.size,
    isReduced: !fits,
    dataUrl: await dataUrl(sent.blob),
    previewUrl: URL.createObjectURL(sent.blob),
  };
}

export function forget(picture) {
  URL.revokeObjectURL(picture.previewUrl);
}

/** A JPEG within both limits, on white where the picture is transparent, as the server would do. */
async function reduced(bitmap, maxBytes, maxPixels) {
  const { width, height } = bitmap;
  let scale = Math.min(1, Math.sqrt(maxPixels / (width * height)), MAX_SIDE / width, MAX_SIDE / height);
  for (;;) {
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.floor(width * scale));
    canvas.height = Math.max(1, Math.floor(height * scale));
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
    if (blob === null) throw new Error("This browser could not reduce the picture.");
    if (blob.size <= maxBytes || canvas.width * canvas.height <= 4096) return { blob, width: canvas.width, height: canvas.height };
    scale *= 0.95 * Math.sqrt(maxBytes / blob.size);
  }
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The picture could not be read."));
    reader.readAsDataURL(blob);
  });
}

/** A small scene to begin with, drawn here, so that the first question needs no file. */
export async function drawnPicture() {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [336, 252];
  const context = canvas.getContext("2d");
  const fill = (color, path) => {
    context.fillStyle = color;
    context.beginPath();
    path();
    context.fill();
  };
  fill("#fffdf8", () => context.rect(0, 0, 336, 252));
  fill("#e02a26", () => context.arc(96, 99, 51, 0, 7));
  fill("#1f5fd6", () => context.rect(189, 63, 93, 93));
  fill("#ffd21f", () => {
    context.moveTo(168, 159);
    context.lineTo(225, 231);
    context.lineTo(111, 231);
  });
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], "drawing.png", { type: "image/png" });
}
