// A block of code with its language, a button that copies it, and its syntax in colours.

import { copied } from "./clipboard";
import type { Colour } from "./paint";
import { syntaxOf } from "./syntax";

export interface CodeBlock {
  element: HTMLElement;
  body: HTMLElement; // takes the text nodes
  close: (text: string) => Colour[]; // once the code is whole
}

export function code(info: string): CodeBlock {
  const language = /^[\w+#.-]*/.exec(info.trim())?.[0]?.toLowerCase() ?? "";
  const element = document.createElement("figure");
  element.className = "code";
  const head = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || "code";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "plain";
  button.textContent = "Copy";
  button.ariaLabel = "Copy code";
  const frame = document.createElement("pre");
  frame.tabIndex = 0; // scrolled by keys
  const body = document.createElement("code");
  frame.append(body);
  head.append(name, button);
  element.append(head, frame);
  button.addEventListener("click", () => copied(body.textContent ?? "", button));
  return { element, body, close: (text) => coloured(body, text, language) };
}

// The stretches of syntax as ranges of the text nodes, over which one stretch may run.
function coloured(body: HTMLElement, text: string, language: string): Colour[] {
  const walk = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
  const found: Colour[] = [];
  let node = walk.nextNode() as Text | null;
  let start = 0;
  for (const { name, from, to } of syntaxOf(text, language)) {
    let at = from;
    while (node && at < to) {
      const end = Math.min(to, start + node.length);
      if (end > at) found.push({ name, node, from: at - start, to: end - start });
      at = Math.max(at, end);
      if (at < start + node.length) break;
      start += node.length;
      node = walk.nextNode() as Text | null;
    }
  }
  return found;
}
