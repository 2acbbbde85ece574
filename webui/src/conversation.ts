// A conversation is a tree: a message that was edited and a reply that was made again are branches beside the old ones.

import { signal } from "@preact/signals";
import type { Picture } from "./picture";
import { Reply, type SavedReply } from "./reply";
import type { Part, Turn } from "./wire";

export interface File {
  name: string;
  text: string;
}

export interface Message {
  text: string;
  files: File[];
  pictures?: Picture[]; // absent in conversations that were kept before there were any
}

export interface Question extends Message {
  id: string;
  parent: string | null;
  kind: "question";
}

export interface Answer {
  id: string;
  parent: string;
  kind: "answer";
  reply: Reply;
}

export type Node = Question | Answer;
export type SavedAnswer = Omit<Answer, "reply"> & { reply: SavedReply };
export type SavedNode = Question | SavedAnswer;

export interface SavedConversation {
  id: string;
  title: string;
  changed: number; // milliseconds since 1970
  leaf: string | null;
  nodes: SavedNode[];
}

const TITLE_LENGTH = 60;

export function freshId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (one) => one.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  readonly nodes = new Map<string, Node>();
  readonly version = signal(0);
  leaf: string | null = null;
  title = "";
  changed = 0;
  isForgotten = false; // deleted, and not to be kept again

  constructor(readonly id = freshId()) {}

  // From the first message to the leaf.
  path(leaf = this.leaf): Node[] {
    const found: Node[] = [];
    for (let node = this.nodes.get(leaf ?? ""); node; node = this.nodes.get(node.parent ?? "")) found.push(node);
    return found.reverse();
  }

  // The images that a prompt ending with the leaf shows.
  pictures(leaf = this.leaf): Picture[] {
    return this.path(leaf).flatMap((node) => (node.kind === "question" ? (node.pictures ?? []) : []));
  }

  // The node and those that stand where it stands, oldest first.
  siblings(node: Node): Node[] {
    return [...this.nodes.values()].filter((one) => one.parent === node.parent && one.kind === node.kind);
  }

  add(node: Node): void {
    this.nodes.set(node.id, node);
    this.leaf = node.id;
    if (!this.title && node.kind === "question") this.title = titleOf(node);
    this.touch();
  }

  touch(): void {
    this.changed = Date.now();
    this.version.value++;
  }

  // Goes to a branch, down to its newest leaf.
  choose(node: Node): void {
    let leaf = node;
    for (;;) {
      const children = [...this.nodes.values()].filter((one) => one.parent === leaf.id);
      const newest = children.at(-1);
      if (!newest) break;
      leaf = newest;
    }
    this.leaf = leaf.id;
    this.touch();
  }

  // The messages of a prompt that ends with the node.
  turns(leaf: string | null, system: string): Turn[] {
    const said: Turn[] = this.path(leaf).map((node) =>
      node.kind === "question" ? { role: "user", content: partsOf(node) } : node.reply.turn(),
    );
    return system.trim() ? [{ role: "system", content: system }, ...said] : said;
  }

  saved(): SavedConversation {
    const { id, title, changed, leaf } = this;
    const nodes = [...this.nodes.values()].map((node) =>
      node.kind === "question" ? node : { ...node, reply: node.reply.saved() },
    );
    return { id, title, changed, leaf, nodes };
  }

  static from(saved: SavedConversation): Conversation {
    const made = new Conversation(saved.id);
    for (const node of saved.nodes) {
      made.nodes.set(node.id, node.kind === "question" ? node : { ...node, reply: Reply.from(node.reply) });
    }
    Object.assign(made, { leaf: saved.leaf, title: saved.title, changed: saved.changed });
    return made;
  }
}

function titleOf(question: Question): string {
  const words = question.text.trim().split(/\s+/).join(" ") || question.files[0]?.name || question.pictures?.[0]?.name || "";
  const letters = [...words]; // a character may be two of a string's units
  return letters.length > TITLE_LENGTH ? `${letters.slice(0, TITLE_LENGTH - 1).join("")}…` : words;
}

// Attached files come first, each in a fence that is longer than any in it.
export function contentOf({ text, files }: Message): string {
  const parts = files.map((file) => {
    const longest = Math.max(2, ...[...file.text.matchAll(/`{3,}/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${file.name}:\n${fence}\n${file.text}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

export function isEmpty({ text, files, pictures }: Message): boolean {
  return !text.trim() && !files.length && !pictures?.some(({ url }) => url);
}

// Images come before the text that asks about them. What has none stays a plain string.
function partsOf(message: Message): string | Part[] {
  const text = contentOf(message);
  const urls = (message.pictures ?? []).flatMap(({ url }) => url ?? []);
  if (!urls.length) return text;
  const images: Part[] = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...images, { type: "text", text }] : images;
}
