// A part of a reply on the page, growing as the reply does.

import { effect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { followed } from "./follow";
import { heard } from "./inspect";
import type { Reply } from "./reply";
import { Written } from "./written";

interface Shown {
  reply: Reply;
  part: "text" | "thinking";
  markdown: boolean;
}

export function Body({ reply, part, markdown }: Shown) {
  const host = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const into = host.current as HTMLDivElement;
    const written = new Written(into, reply.trail, part, markdown);
    let next = 0;
    const bring = () => {
      const isDone = followed(() => written.update(reply[part], reply.state.peek() !== "writing"));
      if (!isDone) next = requestAnimationFrame(bring);
    };
    const end = effect(() => {
      reply.tick.value;
      cancelAnimationFrame(next);
      bring();
    });
    const unhear = heard(into, reply, written);
    return () => {
      end();
      unhear();
      cancelAnimationFrame(next);
      written.drop();
      into.replaceChildren();
    };
  }, [reply, reply.nParts, part]);
  const label = part === "text" ? "Answer; arrow keys go through its tokens" : "Thinking";
  return (
    <div
      ref={host}
      class={markdown ? "body prose" : "body verbatim"}
      tabIndex={0}
      role="group"
      aria-label={label}
    />
  );
}
