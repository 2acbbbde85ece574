// Conversations in this browser's IndexedDB: kept, listed, searched, deleted, exported and imported.

import { signal } from "@preact/signals";
import { forgetAllImages, forgetImages, keepImages, withImages, withoutImages } from "./album";
import type { Conversation, Question, SavedAnswer, SavedConversation, SavedNode } from "./conversation";
import { Store } from "./store";

export interface Entry {
  id: string;
  title: string;
  changed: number;
}

const FORMAT = "slipstream-conversations";
export const entries = signal<Entry[]>([]);
export const isKept = signal(true); // false where the browser refuses its database, as some private windows do
const chats = new Store("slipstream", "conversations", { keyPath: "id" });
const tabs = new BroadcastChannel("chats"); // of this page: each says when it has changed what is kept
tabs.onmessage = () => void readEntries();

export async function keep(conversation: Conversation): Promise<void> {
  if (!conversation.nodes.size || conversation.isForgotten) return;
  const saved = conversation.saved();
  try {
    await merge(withoutImages(saved));
  } catch {
    isKept.value = false;
    return;
  }
  await keepImages(saved);
  const { id, title, changed } = conversation;
  if ((await chats.asked("readonly", (store) => store.count(id))) === 0) {
    await forgetImages(id); // the chat was deleted in the meantime, here or in another tab
    return;
  }
  list([{ id, title, changed }, ...entries.value.filter((one) => one.id !== id)]);
  tabs.postMessage("changed");
}

// Puts a conversation where it was, with the messages that another tab has added there since.
async function merge(saved: SavedConversation): Promise<void> {
  await chats.asked("readwrite", (store) => {
    const earlier: IDBRequest<SavedConversation | undefined> = store.get(saved.id);
    earlier.onsuccess = () => {
      const mine = new Set(saved.nodes.map(({ id }) => id));
      const others = earlier.result?.nodes.filter(({ id }) => !mine.has(id)) ?? [];
      store.put({ ...saved, nodes: [...others, ...saved.nodes] });
    };
    return earlier;
  });
}

function list(found: Entry[]): void {
  entries.value = found.sort((a, b) => b.changed - a.changed);
}

export async function open(id: string): Promise<SavedConversation | undefined> {
  const saved: SavedConversation | undefined = await chats.asked("readonly", (store) => store.get(id));
  return saved && withImages(saved);
}

function all(): Promise<SavedConversation[]> {
  return chats.asked("readonly", (store) => store.getAll());
}

export async function readEntries(): Promise<void> {
  try {
    list((await all()).map(({ id, title, changed }) => ({ id, title, changed })));
  } catch {
    isKept.value = false;
  }
}

export async function remove(id: string): Promise<void> {
  await chats.asked("readwrite", (store) => store.delete(id));
  await forgetImages(id);
  list(entries.value.filter((one) => one.id !== id));
  tabs.postMessage("changed");
}

export async function removeAll(): Promise<void> {
  await chats.asked("readwrite", (store) => store.clear());
  await forgetAllImages();
  list([]);
  tabs.postMessage("changed");
}

// The ids of conversations in which all the words occur.
export async function search(words: string): Promise<Set<string>> {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = (await all()).filter((one) => {
    const texts = one.nodes.map((node) => (node.kind === "question" ? node.text : node.reply.text));
    const text = `${one.title}\n${texts.join("\n")}`.toLowerCase();
    return wanted.every((word) => text.includes(word));
  });
  return new Set(found.map(({ id }) => id));
}

// A file with all conversations and their images; in parts, as a string has no room for many images.
export async function exported(): Promise<Blob> {
  const parts: string[] = [];
  for (const one of await all()) parts.push(parts.length ? "," : "", JSON.stringify(await withImages(one)));
  const head = JSON.stringify({ format: FORMAT, version: 1 }).slice(0, -1);
  return new Blob([`${head},"conversations":[`, ...parts, "]}"], { type: "application/json" });
}

// Adds what a file of `exported` holds; of two with one id the later stays. Throws an Error in words.
export async function imported(text: string): Promise<number> {
  let file: { format?: string; version?: number; conversations?: SavedConversation[] };
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations)) {
    throw new Error("This file holds no exported conversations.");
  }
  const mine = new Map((await all()).map((one) => [one.id, one.changed]));
  const taken = file.conversations.filter((one) => isWhole(one) && (mine.get(one.id) ?? 0) <= one.changed);
  for (const one of taken) {
    await chats.asked("readwrite", (store) => store.put(withoutImages(one)));
    await keepImages(one);
  }
  await readEntries();
  tabs.postMessage("changed");
  return taken.length;
}

function isWhole(one: SavedConversation): boolean {
  return (
    typeof one?.id === "string" &&
    typeof one.title === "string" &&
    typeof one.changed === "number" &&
    Array.isArray(one.nodes) &&
    one.nodes.every((node) => typeof node?.id === "string" && (node.kind === "question" ? isQuestion(node) : isAnswer(node))) &&
    isTree(one.nodes)
  );
}

// What a view relies on: one that fails would take the page with it, also after a reload.
function isQuestion({ text, files, pictures }: Question): boolean {
  const isNamed = (one: { name: string }) => typeof one?.name === "string";
  return (
    typeof text === "string" &&
    Array.isArray(files) &&
    files.every((file) => isNamed(file) && typeof file.text === "string") &&
    (pictures === undefined || (Array.isArray(pictures) && pictures.every(isNamed)))
  );
}

function isAnswer({ reply }: SavedAnswer): boolean {
  const trail = reply?.trail;
  const lists = [reply?.calls, trail?.pieces, trail?.sources, trail?.steps, trail?.stretches?.text, trail?.stretches?.thinking];
  return typeof reply?.text === "string" && typeof reply.thinking === "string" && lists.every(Array.isArray);
}

// Whether the way from every message to the first one ends.
function isTree(nodes: SavedNode[]): boolean {
  const parents = new Map(nodes.map(({ id, parent }) => [id, parent]));
  return nodes.every(({ id }) => {
    let at: string | null | undefined = id;
    for (let n = 0; at; n++, at = parents.get(at)) if (n > nodes.length) return false;
    return true;
  });
}
