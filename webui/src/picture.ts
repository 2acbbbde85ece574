// Images of messages: which files are images, and what a file becomes.

// What the server reads, by the bytes that such files begin with. A file's name may say something else.
const KINDS: [type: string, begins: RegExp][] = [
  ["image/png", /^\x89PNG\r\n\x1a\n/],
  ["image/jpeg", /^\xff\xd8\xff/],
  ["image/gif", /^GIF8[79]a/],
  ["image/webp", /^RIFF[^]{4}WEBP/],
];
const ADDRESS = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+=*$/;

export const TYPES = KINDS.map(([type]) => type).join(",");

export interface Picture {
  id: string;
  name: string;
  width: number;
  height: number;
  url?: string; // a data: address; absent where the browser did not keep it
}

export function typeOf(bytes: Uint8Array): string | null {
  const begin = String.fromCharCode(...bytes.subarray(0, 12));
  return KINDS.find(([, begins]) => begins.test(begin))?.[0] ?? null;
}

// Whether a text from elsewhere is an image's data: address, which loads nothing and runs nothing.
export function isAddress(url: unknown): url is string {
  return typeof url === "string" && ADDRESS.test(url);
}

// The size in pixels. Throws if the browser cannot read the image.
export async function sizeOf(image: Blob): Promise<{ width: number; height: number }> {
  const bitmap = await createImageBitmap(image);
  const { width, height } = bitmap;
  bitmap.close();
  return { width, height };
}

export function addressOf(image: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(image);
  });
}
