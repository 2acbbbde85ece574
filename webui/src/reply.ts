// A reply while it is written and afterwards: its text, its thinking, its calls, its tokens, and what it cost.

import { signal } from "@preact/signals";
import { added, type End, endOf } from "./tally";
import { type Saved, Trail } from "./trail";
import type { CallPart, Chunk, Turn } from "./wire";

export type State = "writing" | "done" | "stopped" | "failed";

export interface Call {
  id: string;
  name: string;
  given: string; // arguments, as text
}

export interface SavedReply {
  text: string;
  thinking: string;
  calls: Call[];
  trail: Saved;
  end: End | null;
  reason: string | null;
  state: State;
  asked: Record<string, unknown>;
  system: string;
  continued: boolean;
}

const OPENING = /^\s*<think(?:ing)?>\s*/;
const CLOSING = /<\/think(?:ing)?>\s*/;
const LONGEST_TAG = 16;

export class Reply {
  text = "";
  thinking = "";
  calls: Call[] = [];
  trail = new Trail();
  end: End | null = null;
  reason: string | null = null;
  continued = false;
  nParts = 1; // times it was begun or continued on this page
  nBefore = 0; // tokens of the parts before this one
  startedAt = 0; // of this part's first token, on the page's clock
  lastAt = 0;
  readonly state = signal<State>("writing");
  readonly tick = signal(0); // rises, at most once a frame, when something came
  private held = ""; // text of which it is not known yet whether it is thinking
  private thinksAloud: "unknown" | "yes" | "no" = "unknown";
  private frame = 0;

  // `asked`: the request's fields beside its messages; `system`: the system prompt, which is none of the conversation's.
  constructor(
    readonly asked: Record<string, unknown> = {},
    readonly system = "",
  ) {}

  get isEmpty(): boolean {
    return !this.text && !this.thinking && !this.calls.length;
  }

  add(chunk: Chunk): void {
    const choice = chunk.choices[0];
    if (!choice) {
      const end = endOf(chunk);
      this.end = this.end ? added(this.end, end) : end;
      return;
    }
    const { delta } = choice;
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    this.trail.add(chunk.spec, thought + (delta.content ?? ""));
    this.lastAt = performance.now();
    if (!this.startedAt && this.trail.n > this.nBefore) this.startedAt = this.lastAt;
    if (thought) this.think(thought);
    if (delta.content) this.say(delta.content);
    for (const part of delta.tool_calls ?? []) this.call(part);
    this.reason = choice.finish_reason ?? this.reason;
    this.changed();
  }

  private think(text: string): void {
    this.thinking += text;
    this.trail.place("thinking", text);
  }

  // Content, in which a model whose format the server does not know may think between tags.
  private say(text: string): void {
    if (this.thinksAloud === "no") {
      this.tell(text);
      return;
    }
    this.held += text;
    if (this.thinksAloud === "unknown") this.open();
    if (this.thinksAloud === "yes") this.close();
  }

  private open(): void {
    const opening = OPENING.exec(this.held);
    if (opening) {
      this.thinksAloud = "yes";
      this.held = this.held.slice(opening[0].length);
    } else if (!"<thinking>".startsWith(this.held.trim()) && !"<think>".startsWith(this.held.trim())) {
      this.thinksAloud = "no";
      this.release();
    }
  }

  private close(): void {
    const closing = CLOSING.exec(this.held);
    if (closing) {
      this.think(this.held.slice(0, closing.index));
      this.held = this.held.slice(closing.index + closing[0].length);
      this.thinksAloud = "no";
      this.release();
    } else if (this.held.length > LONGEST_TAG) {
      this.think(this.held.slice(0, -LONGEST_TAG));
      this.held = this.held.slice(-LONGEST_TAG);
    }
  }

  private release(): void {
    const text = this.held;
    this.held = "";
    if (!text) return;
    if (this.thinksAloud === "yes") this.think(text);
    else this.tell(text);
  }

  private tell(text: string): void {
    this.text += text;
    this.trail.place("text", text);
  }

  private call(part: CallPart): void {
    const call = (this.calls[part.index] ??= { id: "", name: "", given: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.given += part.function?.arguments ?? "";
  }

  private changed(): void {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.tick.value++;
    });
  }

  finish(state: State): void {
    this.release();
    this.state.value = state;
    this.tick.value++;
  }

  // Before it is continued.
  reopen(): void {
    this.continued = true;
    this.nParts++;
    this.thinksAloud = "no";
    this.nBefore = this.trail.n;
    this.startedAt = 0;
    this.reason = null;
    this.state.value = "writing";
  }

  // As a part of the next prompt.
  turn(): Turn {
    const turn: Turn = { role: "assistant", content: this.text };
    if (this.thinking) turn.reasoning_content = this.thinking;
    if (this.calls.length) {
      turn.tool_calls = this.calls.map(({ id, name, given }) => ({
        id,
        type: "function",
        function: { name, arguments: given },
      }));
      turn.content = this.text || null;
    }
    return turn;
  }

  saved(): SavedReply {
    const { text, thinking, calls, end, reason, asked, system, continued } = this;
    const state = this.state.peek();
    return { text, thinking, calls, trail: this.trail.saved(), end, reason, state, asked, system, continued };
  }

  static from(saved: SavedReply): Reply {
    const reply = new Reply(saved.asked, saved.system);
    const { text, thinking, calls, end, reason, continued } = saved;
    Object.assign(reply, { text, thinking, calls, end, reason, continued });
    reply.trail = Trail.from(saved.trail);
    reply.state.value = saved.state;
    return reply;
  }
}
