// The tokens of a reply one by one: exact, with marks where steps begin, and with rejected drafts beside what the target
// chose instead. Groups far from the window are empty boxes of about the right height.

import { quoted } from "./inspect";
import { letterOf, TARGET, tintOf } from "./sources";
import type { StepRecord, Trail } from "./trail";

const FEWEST = 80; // tokens of a group, which ends at the next line break …
const MOST = 240; // … or here
const MARGIN = "900px 0px";
const CHARACTERS = 90; // of a line, about
const LINE = 27; // pixels

interface Group {
  element: HTMLElement;
  from: number;
  to: number;
  made: number; // tokens of it that are on the page
  isNear: boolean;
}

export class TokenList {
  private groups: Group[] = [];
  private taken = 0;
  private readonly watcher: IntersectionObserver;

  constructor(
    private readonly host: HTMLElement,
    private readonly trail: Trail,
  ) {
    this.watcher = new IntersectionObserver((seen) => seen.forEach((one) => this.seen(one)), {
      rootMargin: MARGIN,
    });
  }

  // Brings the tokens that have come since.
  update(): void {
    const known = this.groups.length;
    for (; this.taken < this.trail.n; this.taken++) {
      const last = this.groups.at(-1);
      if (!last || this.isFull(last)) this.open();
      (this.groups.at(-1) as Group).to = this.taken + 1;
    }
    for (const group of this.groups.slice(Math.max(0, known - 1))) {
      // A box without a height would be in sight, and with it all that come behind.
      if (!group.made) group.element.style.minHeight = `${this.height(group)}px`;
    }
    for (const group of this.groups.slice(-3)) if (group.isNear) this.fill(group);
  }

  private isFull({ from, to }: Group): boolean {
    const n = to - from;
    return n >= MOST || (n >= FEWEST && (this.trail.pieces[to - 1] as string).includes("\n"));
  }

  private open(): void {
    const element = document.createElement("div");
    element.className = "group";
    const from = this.taken;
    // New ones come at the end, where a reader of a growing reply is; the watcher corrects that.
    this.groups.push({ element, from, to: from, made: 0, isNear: this.groups.length < 3 });
    this.host.append(element);
    this.watcher.observe(element);
  }

  private seen({ target, isIntersecting }: IntersectionObserverEntry): void {
    const group = this.groups.find((one) => one.element === target);
    if (!group || group.isNear === isIntersecting) return;
    group.isNear = isIntersecting;
    if (isIntersecting) {
      this.fill(group);
      return;
    }
    group.element.style.minHeight = `${group.element.offsetHeight || this.height(group)}px`;
    group.element.replaceChildren();
    group.made = 0;
  }

  private height({ from, to }: Group): number {
    let lines = 1;
    for (let i = from; i < to; i++) lines += (this.trail.pieces[i] as string).split("\n").length - 1;
    const characters = this.trail.pieces.slice(from, to).join("").length;
    return LINE * Math.max(lines, Math.ceil(characters / CHARACTERS));
  }

  private fill(group: Group): void {
    group.element.style.minHeight = "";
    const made = document.createDocumentFragment();
    for (let i = group.from + group.made; i < group.to; i++) this.token(i, made, i === group.from);
    group.made = group.to - group.from;
    group.element.append(made);
  }

  private token(i: number, into: DocumentFragment, isFirst: boolean): void {
    const { trail } = this;
    const step = trail.steps[trail.stepOf[i] as number];
    if (step?.known && i === step.first + step.nAccepted) rejected(step, into);
    const source = trail.sources[i] as string;
    const made = element("span", "token");
    made.dataset.source = tintOf(source);
    made.dataset.token = `${i}`;
    if (step && i === step.first) made.classList.add("first");
    const isNew = isFirst || source !== trail.sources[i - 1] || made.classList.contains("first");
    if (source !== TARGET && isNew) {
      const letter = element("sup", "", letterOf(source));
      letter.ariaHidden = "true";
      made.append(letter, element("span", "hidden", `${source}: `));
    }
    made.append((trail.pieces[i] as string).replaceAll("\n", "↵\n"));
    into.append(made);
  }

  // The element that shows a token, if it is near.
  of(token: number): Element | null {
    const group = this.groups.find((one) => one.from <= token && token < one.to);
    if (group && !group.made) {
      group.isNear = true;
      this.fill(group);
    }
    return group?.element.querySelector(`[data-token="${token}"]`) ?? null;
  }

  drop(): void {
    this.watcher.disconnect();
  }
}

// The drafted tokens that the target did not choose, first the one that it replaced.
function rejected(step: StepRecord, into: DocumentFragment): void {
  for (const [i, piece] of step.drafted.slice(step.nAccepted).entries()) {
    const gone = element("del", i ? "later" : "");
    gone.append(element("span", "hidden", "rejected: "), quoted(piece));
    into.append(gone);
  }
}

function element(name: string, className: string, text?: string): HTMLElement {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
