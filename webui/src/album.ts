// Images of kept conversations, in a database beside theirs: a list or a search reads none of them, and a conversation
// is kept even where its images are too large for what the browser grants.

import { signal } from "@preact/signals";
import type { SavedConversation } from "./conversation";
import { isAddress, type Picture } from "./picture";
import { Store } from "./store";

export const unkept = signal<ReadonlySet<string>>(new Set()); // ids of images that are not in the database
const images = new Store("slipstream-images", "images"); // keys: [conversation, image]

function of(conversation: string): IDBKeyRange {
  return IDBKeyRange.bound([conversation], [conversation, []]);
}

function picturesIn(saved: SavedConversation): Picture[] {
  return saved.nodes.flatMap((node) => (node.kind === "question" ? (node.pictures ?? []) : []));
}

function mapped(saved: SavedConversation, change: (picture: Picture) => Picture): SavedConversation {
  const nodes = saved.nodes.map((node) =>
    node.kind === "question" && node.pictures ? { ...node, pictures: node.pictures.map(change) } : node,
  );
  return { ...saved, nodes };
}

export function withoutImages(saved: SavedConversation): SavedConversation {
  return mapped(saved, ({ id, name, width, height }) => ({ id, name, width, height }));
}

export async function withImages(saved: SavedConversation): Promise<SavedConversation> {
  if (!picturesIn(saved).length) return saved;
  const urls = new Map<string, string>();
  try {
    const keys = await images.asked("readonly", (store) => store.getAllKeys(of(saved.id)));
    const values: string[] = await images.asked("readonly", (store) => store.getAll(of(saved.id)));
    keys.forEach((key, i) => urls.set((key as string[])[1] as string, values[i] as string));
  } catch {
    // the page says of each image that it is not there
  }
  return mapped(saved, (one) => ({ ...one, url: urls.get(one.id) }));
}

// Keeps the images that are not kept yet, each for itself: where one does not fit, a smaller one may.
export async function keepImages(saved: SavedConversation): Promise<void> {
  const pictures = picturesIn(saved);
  if (!pictures.length) return;
  const keys = await images.asked("readonly", (store) => store.getAllKeys(of(saved.id))).catch(() => []);
  const kept = new Set(keys.map((key) => (key as string[])[1]));
  const lost = new Set(unkept.value);
  for (const { id, url } of pictures) {
    if (kept.has(id) || !isAddress(url)) continue;
    await images.asked("readwrite", (store) => store.put(url, [saved.id, id])).then(
      () => lost.delete(id),
      () => lost.add(id),
    );
    kept.add(id);
  }
  unkept.value = lost;
}

export async function forgetImages(conversation: string): Promise<void> {
  await images.asked("readwrite", (store) => store.delete(of(conversation))).catch(() => {});
}

export async function forgetAllImages(): Promise<void> {
  await images.asked("readwrite", (store) => store.clear()).catch(() => {});
}
