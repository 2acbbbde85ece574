// Asking the server for replies. What is being written is an attempt, and becomes part of the conversation only when
// it has ended well: a failed reply never enters a later prompt, and its message goes back to the composer.

import { batch, effect, signal } from "@preact/signals";
import { type Answer, Conversation, type File, freshId, isEmpty, type Message, type Node, type Question } from "./conversation";
import type { Failure } from "./failure";
import { followFigures } from "./follow";
import { keep, open } from "./history";
import type { Picture } from "./picture";
import { Reply } from "./reply";
import { isReady } from "./server";
import { asked, system } from "./settings";
import { keepText, keptText } from "./store";
import { chat } from "./transport";
import type { Turn } from "./wire";

export interface Attempt {
  id: string; // of the answer that it becomes
  conversation: Conversation;
  question: Question | null; // null: one that is in the conversation is answered again, or a reply goes on
  parent: string | null; // what the prompt ends with, but for the question
  reply: Reply;
  continues: Answer | null;
  failure: Failure | null;
  again: () => void;
}

export const conversation = signal(new Conversation());
export const attempt = signal<Attempt | null>(null);
export const draft = signal(keptText("sessionStorage", "draft") ?? "");
export const draftFiles = signal<File[]>([]);
export const draftPictures = signal<Picture[]>([]);
export const announced = signal(""); // for screen readers
let control: AbortController | null = null;
let opening: string | null = null; // the conversation that is being read

draft.subscribe((text) => {
  if (!isWriting()) keepText("sessionStorage", "draft", text);
});

export function isWriting(): boolean {
  return attempt.value !== null && attempt.value.failure === null;
}

export function send(message: Message, parent = conversation.value.leaf): void {
  if (isEmpty(message)) return;
  const { text, files, pictures } = message;
  const question: Question = { id: freshId(), parent, kind: "question", text, files, pictures };
  // Should the page be left now, the message is still there when it comes back.
  keepText("sessionStorage", "draft", text);
  begin({ question, parent, again: () => send(message, parent) });
}

export function regenerate(answer: Answer): void {
  const { parent } = answer;
  begin({ question: null, parent, again: () => regenerate(answer) });
}

export function goOn(answer: Answer): void {
  begin({ question: null, parent: answer.parent, continues: answer, again: () => goOn(answer) });
}

export function stop(): void {
  control?.abort();
}

type Begun = Pick<Attempt, "question" | "parent" | "again"> & { continues?: Answer };

async function begin({ question, parent, again, continues }: Begun): Promise<void> {
  if (isWriting() || !isReady.value) return;
  const fields = asked();
  const reply = continues?.reply ?? new Reply(fields, system.value);
  const messages = promptOf(question, continues?.id ?? parent);
  const body = { ...fields, messages, ...(continues ? { continue_final_message: true, add_generation_prompt: false } : {}) };
  const before = continues && structuredClone(continues.reply.saved());
  if (continues) reply.reopen();
  const mine: Attempt = {
    id: freshId(),
    conversation: conversation.value,
    question,
    parent,
    reply,
    continues: continues ?? null,
    failure: null,
    again,
  };
  attempt.value = mine;
  control = new AbortController();
  const { signal: aborted } = control;
  try {
    for await (const chunk of chat(body, aborted)) reply.add(chunk);
    settle(mine, "done");
  } catch (error) {
    if (aborted.aborted) settle(mine, "stopped");
    else fail(mine, error as Failure);
    // A continuation that failed leaves nothing behind.
    if (mine.continues && before && !aborted.aborted) mine.continues.reply = Reply.from(before);
    conversation.value.version.value++;
  }
}

function promptOf(question: Question | null, leaf: string | null): Turn[] {
  const now = conversation.value;
  if (!question) return now.turns(leaf, system.value);
  const with_ = new Conversation();
  for (const node of now.path(leaf)) with_.add(node);
  with_.add(question);
  return with_.turns(question.id, system.value);
}

function settle(mine: Attempt, state: "done" | "stopped"): void {
  const { reply, question, continues } = mine;
  batch(() => {
    reply.finish(state);
    attempt.value = null;
    if (reply.isEmpty && question && state === "stopped") giveBack(question);
    else if (!continues) enter(mine);
    else mine.conversation.touch();
  });
  followFigures();
  announced.value = `Answer ${state === "done" ? "finished" : "stopped"}: ${reply.text.slice(0, 1000)}`;
  void keep(mine.conversation).then(() => {
    if (!isWriting()) keepText("sessionStorage", "draft", draft.value);
  });
}

function enter({ id, conversation: into, question, parent, reply }: Attempt): void {
  if (question) into.add(question);
  const answer: Answer = { id, parent: question?.id ?? (parent as string), kind: "answer", reply };
  into.add(answer);
}

function giveBack({ text, files, pictures }: Question): void {
  draft.value = draft.value && draft.value !== text ? `${text}\n\n${draft.value}` : text;
  draftFiles.value = [...files, ...draftFiles.value.filter((one) => !files.includes(one))];
  const added = draftPictures.value.filter((one) => !pictures?.includes(one));
  draftPictures.value = [...(pictures ?? []), ...added];
}

function fail(mine: Attempt, failure: Failure): void {
  mine.reply.finish("failed");
  attempt.value = { ...mine, failure };
  if (mine.question) giveBack(mine.question);
  announced.value = failure.sentence;
}

export function dismiss(): void {
  attempt.value = null;
}

// Retry: with what the composer holds by now, if the message is there.
export function retry(): void {
  const failed = attempt.value;
  if (!failed?.failure) return;
  attempt.value = null;
  if (!failed.question) {
    failed.again();
    return;
  }
  send(takeDraft(), failed.parent);
}

export function drafted(): Message {
  return { text: draft.value, files: draftFiles.value, pictures: draftPictures.value };
}

// What the composer holds, which is then empty.
export function takeDraft(): Message {
  const taken = drafted();
  draft.value = "";
  draftFiles.value = [];
  draftPictures.value = [];
  return taken;
}

export function startOver(): void {
  opening = null;
  leave();
  conversation.value = new Conversation();
  location.hash = "#/chat";
}

// Where the conversation is deleted: a reply that is being written would bring it back as it stops.
export function forgetConversation(): void {
  conversation.value.isForgotten = true;
  startOver();
}

function leave(): void {
  stop();
  attempt.value = null;
}

export async function openConversation(id: string): Promise<void> {
  opening = id;
  if (conversation.value.id === id) return;
  const saved = await open(id).catch(() => undefined);
  if (!saved || opening !== id) return;
  leave(); // only now: what was begun meanwhile would go on unseen
  conversation.value = Conversation.from(saved);
}

export function chooseBranch(node: Node, step: number): void {
  const siblings = conversation.value.siblings(node);
  const other = siblings[siblings.indexOf(node) + step];
  if (other) conversation.value.choose(other);
  void keep(conversation.value);
}

// The address names the conversation, so that a reload comes back to it.
effect(() => {
  const now = conversation.value;
  now.version.value;
  const isChat = !location.hash || location.hash.startsWith("#/chat");
  if (now.nodes.size && isChat) history.replaceState(null, "", `#/chat/${now.id}`);
});
