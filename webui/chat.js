// The conversation on the page. What a model wrote is only ever set as text, never as markup.

const conversation = document.querySelector("#conversation");
const end = document.querySelector("#end");

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function clear() {
  conversation.replaceChildren();
}

export function addQuestion(text) {
  const article = element("article", "question");
  article.append(element("pre", "", text));
  conversation.append(article);
  follow(true);
}

// One answer while it is written, and its figures afterwards.
export class Answer {
  constructor() {
    this.text = "";
    this.nTokens = 0;
    this.counts = new Map([["target", 0]]); // source -> tokens
    this.article = element("article", "answer writing");
    this.body = element("pre");
    this.figures = element("p", "figures");
    this.article.append(this.body, this.figures);
    conversation.append(this.article);
    follow(true);
  }

  // A chunk is what one step added: sources and pieces have one entry per token.
  add(chunk) {
    const text = chunk.choices[0]?.delta.content ?? "";
    const sources = chunk.spec?.sources ?? [];
    const pieces = chunk.spec?.pieces ?? [text];
    if (!this.startedAt && sources.length) this.startedAt = performance.now();
    this.text += text;
    this.nTokens += sources.length;
    for (const source of sources) {
      const name = source ?? "target";
      this.counts.set(name, (this.counts.get(name) ?? 0) + 1);
    }
    const wasAtEnd = atEnd();
    pieces.forEach((piece, i) => {
      if (piece) this.body.append(token(piece, sources[i] ?? "target"));
    });
    this.showSpeed();
    follow(wasAtEnd);
  }

  showSpeed() {
    const seconds = (performance.now() - this.startedAt) / 1000;
    if (seconds > 0.2 && this.nTokens > 1) {
      this.figures.textContent = `${this.nTokens} tokens · ${((this.nTokens - 1) / seconds).toFixed(1)} tokens/s`;
    }
  }

  // The last chunk has the server's own figures.
  finish(last, reason) {
    const wasAtEnd = atEnd();
    this.article.classList.remove("writing");
    this.figures.replaceChildren();
    const timings = last?.timings;
    if (timings) {
      this.figure(`${timings.predicted_n} tokens`);
      this.figure(`${timings.predicted_per_second.toFixed(1)} tokens/s`, "generated per second, prompt not counted");
    }
    const run = last?.metrics?.speculative_decoding;
    if (run?.num_draft_tokens) {
      const rate = Math.round(100 * run.draft_acceptance_rate);
      this.figure(`${rate}% of ${run.num_draft_tokens} drafts accepted`, "accepted ÷ drafted tokens");
      this.figure(`${run.mean_acceptance_length.toFixed(2)} tokens per pass`, "mean acceptance length");
    } else if (timings) {
      this.figure("nothing drafted");
    }
    if (last?.seed !== undefined) this.figure(`seed ${last.seed}`);
    if (reason === "length") this.figure("cut at the limit");
    if (reason === "stopped") this.figure("stopped");
    if (this.nTokens) this.article.insertBefore(this.bar(), this.figures);
    follow(wasAtEnd);
  }

  fail(message) {
    this.article.classList.remove("writing");
    this.article.append(element("p", "error", message));
    follow(true);
  }

  figure(text, title) {
    const made = element("span", "", text);
    if (title) made.title = title;
    this.figures.append(made);
  }

  // How much of the answer each source wrote.
  bar() {
    const bar = element("div", "bar");
    for (const [source, count] of this.counts) {
      if (!count) continue;
      const part = element("i");
      part.dataset.source = source;
      part.style.flexGrow = count;
      part.title = `${source}: ${count} of ${this.nTokens} tokens`;
      bar.append(part);
    }
    return bar;
  }
}

function token(text, source) {
  const made = element("span", "token", text);
  made.dataset.source = source;
  made.title = source;
  return made;
}

export function showLegend(list, sources) {
  list.replaceChildren(
    ...sources.map((source) => {
      const item = element("li");
      const swatch = element("i");
      swatch.dataset.source = source;
      item.append(swatch, element("span", "", source));
      return item;
    }),
  );
}

// The end of the conversation is not the end of the page where the settings stand below it.
function atEnd() {
  return end.getBoundingClientRect().top - window.innerHeight < 80;
}

function follow(wanted) {
  if (wanted) end.scrollIntoView({ block: "end" });
}
