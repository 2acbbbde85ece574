// The drafters: a letter, a tint and an underline for each, so that no one of these has to be seen.

export const TARGET = "target";

const LETTERS: Record<string, string> = {
  target: "",
  forced: "F",
  prediction: "P",
  suffix: "S",
  "ngram-simple": "N",
  "ngram-map-k": "K",
  "ngram-map-k4v": "V",
  "ngram-mod": "M",
  "ngram-cache": "C",
  "ngram-device": "G",
  "draft-model": "D",
  "draft-eagle3": "E",
  "draft-mtp": "T",
  "draft-assistant": "A",
  "draft-dflash": "B",
  "draft-dspark": "R",
};
const SPARE = ["other-1", "other-2", "other-3"];
const SPARE_LETTERS = ["X", "Y", "Z"];
const strangers: string[] = [];

// The name of a drafter's tint in style.css: its own, or a spare one for a drafter that this page does not know.
export function tintOf(source: string): string {
  if (source in LETTERS) return source;
  if (!strangers.includes(source)) strangers.push(source);
  return SPARE[strangers.indexOf(source) % SPARE.length] as string;
}

export function letterOf(source: string): string {
  const known = LETTERS[source];
  if (known !== undefined) return known;
  return SPARE_LETTERS[SPARE.indexOf(tintOf(source))] as string;
}

export const TINTS = [...Object.keys(LETTERS).filter((one) => one !== TARGET), ...SPARE];

const WHY_NOT: Record<string, string> = {
  no_drafter: "no drafter is loaded",
  not_asked_for: "the request, or --draft-max 0, asks for plain decoding",
  switched_off: "the drafters are switched off after failures",
  no_guess: "drafters had no guess",
  rows_too_dear: "guesses promised less than their rows cost",
  network_too_slow: "the draft network promised less than its own time and its rows cost",
  not_worth_asking: "drafters are asked only now and then, as their guesses were not worth the asking",
  plain_measured: "a pass without drafts was measured, to see that drafts still pay",
};

export function whyNot(reason: string): string {
  return WHY_NOT[reason] ?? reason.replaceAll("_", " ");
}
