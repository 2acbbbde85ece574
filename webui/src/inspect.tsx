// What is known of one token, shown beside it: under the pointer, at a tap, or by arrow keys.

import { signal } from "@preact/signals";
import { blockOf, markCurrent } from "./paint";
import type { Reply } from "./reply";
import { TARGET, tintOf, whyNot } from "./sources";
import type { StepRecord, Trail } from "./trail";
import type { Written } from "./written";

interface Inspected {
  trail: Trail;
  token: number;
  box: DOMRect;
}

export const inspected = signal<Inspected | null>(null);

export function look(trail: Trail, token: number, box: DOMRect): void {
  inspected.value = { trail, token, box };
}

export function lookAway(): void {
  inspected.value = null;
  markCurrent([]);
}

interface Caret {
  node: Node;
  offset: number;
}

function caretAt(x: number, y: number): Caret | null {
  if (document.caretPositionFromPoint) {
    const found = document.caretPositionFromPoint(x, y);
    return found && { node: found.offsetNode, offset: found.offset };
  }
  const range = document.caretRangeFromPoint?.(x, y);
  return range ? { node: range.startContainer, offset: range.startOffset } : null;
}

let pointer = { x: -1, y: -1 };

// Whether it is the page that moved below the pointer.
export function isStill(event: PointerEvent): boolean {
  const was = pointer;
  pointer = { x: event.screenX, y: event.screenY };
  return event.type === "pointermove" && was.x === pointer.x && was.y === pointer.y;
}

// Lets the pointer and the arrow keys go through the tokens of shown text.
export function heard(host: HTMLElement, reply: Reply, written: Written): () => void {
  const { trail } = reply;
  const show = (token: number) => {
    const place = trail.placeOf(token);
    const ranges = place ? written.blocks.flatMap((one) => one.rangesOf(place.from, place.to)) : [];
    if (!ranges.length) return false;
    markCurrent(ranges);
    look(trail, token, (ranges[0] as Range).getBoundingClientRect());
    return true;
  };
  const point = (event: PointerEvent) => {
    if (isStill(event) || event.buttons) return; // text is being selected, or scrolled by keys
    const token = tokenAt(event, trail);
    if (token < 0 || !show(token)) lookAway();
  };
  const press = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.target !== host || !step) return;
    event.preventDefault();
    const now = inspected.value?.trail === trail ? inspected.value.token : -1;
    let token = Math.max(0, Math.min(trail.n - 1, now + step));
    // Tokens without a text are passed over: from an end inwards, as the last one often has none.
    const on = Number.isFinite(step) ? step : -Math.sign(step);
    while (token >= 0 && token < trail.n && !show(token)) token += on;
  };
  const listening = new AbortController();
  const { signal: until } = listening;
  host.addEventListener("pointermove", point, { signal: until });
  host.addEventListener("pointerup", point, { signal: until });
  host.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && lookAway(), { signal: until });
  host.addEventListener("keydown", press, { signal: until });
  host.addEventListener("blur", lookAway, { signal: until });
  return () => listening.abort();
}

function tokenAt(event: PointerEvent, trail: Trail): number {
  const caret = caretAt(event.clientX, event.clientY);
  const block = caret && blockOf(caret.node);
  if (!caret || !block) return -1;
  const range = document.createRange();
  // A caret stands between characters: which of the two is under the pointer?
  for (const offset of [caret.offset - 1, caret.offset]) {
    if (offset < 0 || offset >= (caret.node.nodeValue?.length ?? 0)) continue;
    range.setStart(caret.node, offset);
    range.setEnd(caret.node, offset + 1);
    const box = range.getBoundingClientRect();
    const isIn = event.clientX >= box.left && event.clientX <= box.right;
    if (!isIn || event.clientY < box.top || event.clientY > box.bottom) continue;
    const place = block.placeOf(caret.node, offset);
    return place < 0 ? -1 : trail.tokenAt(block.part, place);
  }
  return -1;
}

export function quoted(piece: string): string {
  return piece.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "nothing";
}

// In a sentence, of a token: who wrote it. In another: what its step did.
export function facts(trail: Trail, token: number): { who: string; step: string | null } {
  const source = trail.sources[token] as string;
  const step = trail.steps[trail.stepOf[token] as number];
  const place = step ? token - step.first + 1 : 0;
  if (source === TARGET) return { who: "written by the target itself", step: step ? stepFacts(step, trail) : null };
  const of = step?.known ? `, token ${place} of ${step.drafted.length} drafted` : "";
  return { who: `guessed by ${source}${of}`, step: step ? stepFacts(step, trail) : null };
}

export function stepFacts(step: StepRecord, trail: Trail): string | null {
  if (!step.known) return null;
  if (!step.drafted.length) return step.whyNot ? `Nothing drafted: ${whyNot(step.whyNot)}.` : "Nothing drafted.";
  const kept = `${step.drafter} drafted ${step.drafted.length}, ${step.nAccepted} accepted`;
  const rejected = step.drafted[step.nAccepted];
  const own = trail.pieces[step.first + step.nAccepted];
  if (rejected === undefined) return `${kept}.`;
  const instead = own === undefined ? "" : `; the target chose “${quoted(own)}”`;
  return `${kept}. Rejected: “${quoted(rejected)}”${instead}.`;
}

const WIDTH = 320;

export function Inspector() {
  const now = inspected.value;
  if (!now) return <div class="inspector" role="status" />;
  const { trail, token, box } = now;
  const { who, step } = facts(trail, token);
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - WIDTH - 8));
  const isLow = box.bottom > window.innerHeight - 170;
  const style = isLow
    ? { left: `${left}px`, bottom: `${window.innerHeight - box.top + 6}px` }
    : { left: `${left}px`, top: `${box.bottom + 6}px` };
  return (
    <div class="inspector shown" role="status" style={style}>
      <p>
        <code>{quoted(trail.pieces[token] as string)}</code> <span class="muted">token {token + 1}</span>
      </p>
      <p>
        <i class="swatch" data-source={tintOf(trail.sources[token] as string)} aria-hidden="true" /> {who}
      </p>
      {step && <p class="muted">{step}</p>}
    </div>
  );
}
