// Files that are dropped, pasted or chosen: texts and images for the next message, or a sentence on why not.

import { signal } from "@preact/signals";
import { type File as Attached, freshId } from "./conversation";
import { addressOf, type Picture, sizeOf, typeOf } from "./picture";
import { conversation, draftFiles, draftPictures } from "./sending";
import { props, readProps } from "./server";

const MOST_TEXT_BYTES = 4 << 20;
const MOST_BODY_MIB = 20; // where the server does not say
const MIB = 1 << 20;

export const refused = signal("");
let reading: Promise<void> = Promise.resolve();
let nReading = 0; // batches

export function seesImages(): boolean {
  return props.value?.modalities.vision === true;
}

// One batch after the other, so that each sees the room that the one before has left.
export function attach(files: Iterable<File>): Promise<void> {
  const batch = [...files];
  if (!nReading++) refused.value = "";
  reading = reading.then(async () => {
    if (!props.value) await readProps(); // pasted before the server has said what it takes
    for (const file of batch) {
      const fault = await taken(file).catch(() => `${file.name} cannot be read.`);
      if (fault) refused.value = `${refused.value} ${fault}`.trim();
    }
    nReading--;
  });
  return reading;
}

// Settled once every file given so far is in the draft, or refused.
export function settled(): Promise<void> {
  return reading;
}

// Adds a file to the draft, or says why not.
async function taken(file: File): Promise<string | null> {
  const type = typeOf(new Uint8Array(await file.slice(0, 12).arrayBuffer()));
  if (type) return tookPicture(file, type);
  const text = await textOf(file);
  if (typeof text === "string") return text;
  draftFiles.value = [...draftFiles.value, text];
  return null;
}

async function textOf(file: File): Promise<Attached | string> {
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
    if (!seesImages()) return unseen(file);
    return `${file.name} is not an image that can be sent: PNG, JPEG, WebP and GIF can.`;
  }
  if (file.size > MOST_TEXT_BYTES) return `${file.name} is larger than 4 MiB.`;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // no UTF-8
  }
  return `${file.name} is not a text file${seesImages() ? " or an image" : ""}.`;
}

function unseen(file: File): string {
  return `${file.name} is an image, which this model does not take.`;
}

async function tookPicture(file: File, type: string): Promise<string | null> {
  if (!seesImages()) return unseen(file);
  const fault = faultOfRoom(file);
  if (fault) return fault;
  const image = new Blob([file], { type });
  const size = await sizeOf(image).catch(() => null);
  if (!size) return `${file.name} is broken: its image cannot be read.`;
  const picture = { id: freshId(), name: file.name || "image", ...size, url: await addressOf(image) };
  draftPictures.value = [...draftPictures.value, picture];
  return null;
}

// Every request shows all images of the conversation, so these share its limits. Base64 takes a third more than a file.
function faultOfRoom(file: File): string | null {
  const earlier: Picture[] = [...conversation.value.pictures(), ...draftPictures.value];
  const limit = props.value?.settings.image_limit;
  if (limit !== undefined && earlier.length >= limit) {
    const most = limit === 1 ? "1 image" : `${limit} images`;
    return `${file.name} is one too many: this server takes ${most} in a conversation.`;
  }
  const most = (props.value?.settings.max_body ?? MOST_BODY_MIB) * MIB;
  const written = (4 / 3) * file.size;
  if (written > most) return `${file.name} is too large: this server takes images up to ${inMib((3 / 4) * most)}.`;
  const left = most - earlier.reduce((sum, one) => sum + (one.url?.length ?? 0), 0);
  if (written <= left) return null;
  return `${file.name} is too large: beside the conversation’s other images there is room for ${inMib(Math.max(0, (3 / 4) * left))}.`;
}

function inMib(bytes: number): string {
  return `${(Math.floor((10 * bytes) / MIB) / 10).toFixed(1)} MiB`;
}
