// The view *Tokens* of a reply.

import { effect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { followed } from "./follow";
import { inspected, isStill, look, lookAway } from "./inspect";
import type { Reply } from "./reply";
import { TokenList } from "./token_list";

export function Tokens({ reply }: { reply: Reply }) {
  const host = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const into = host.current as HTMLDivElement;
    const list = new TokenList(into, reply.trail);
    const end = effect(() => {
      reply.tick.value;
      followed(() => list.update());
    });
    const unhear = heard(into, reply, list);
    return () => {
      end();
      unhear();
      list.drop();
      into.replaceChildren();
    };
  }, [reply]);
  return (
    <div ref={host} class="tokens verbatim" tabIndex={0} role="group" aria-label="Tokens; arrow keys go through them" />
  );
}

// Lets the pointer and the arrow keys go through the tokens.
function heard(host: HTMLElement, reply: Reply, list: TokenList): () => void {
  const { trail } = reply;
  const mark = (element: Element | null) => {
    host.querySelector(".current")?.classList.remove("current");
    element?.classList.add("current");
  };
  const show = (token: number) => {
    const element = list.of(token);
    mark(element);
    if (element) look(trail, token, element.getBoundingClientRect());
  };
  const point = (event: PointerEvent) => {
    if (isStill(event)) return;
    const found = (event.target as Element).closest<HTMLElement>(".token");
    if (found) show(Number(found.dataset.token));
    else leave();
  };
  const leave = () => {
    mark(null);
    lookAway();
  };
  const press = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !trail.n) return;
    event.preventDefault();
    const now = inspected.value?.trail === trail ? inspected.value.token : -1;
    const token = Math.max(0, Math.min(trail.n - 1, now + step));
    list.of(token)?.scrollIntoView({ block: "nearest" });
    show(token);
  };
  const listening = new AbortController();
  const { signal: until } = listening;
  host.addEventListener("pointermove", point, { signal: until });
  host.addEventListener("pointerup", point, { signal: until });
  host.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave(), { signal: until });
  host.addEventListener("keydown", press, { signal: until });
  host.addEventListener("blur", leave, { signal: until });
  return () => listening.abort();
}
