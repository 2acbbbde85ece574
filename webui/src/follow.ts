// The window stays at the end of a growing reply, unless the reader has scrolled away from it.

const NEAR = 60; // pixels
const FIGURES = 320; // pixels that a finished reply gains below its text, at most

function isAtEnd(near = NEAR): boolean {
  const page = document.documentElement;
  return page.scrollHeight - window.scrollY - window.innerHeight < near;
}

// After a reply has got its figures.
export function followFigures(): void {
  requestAnimationFrame(() => isAtEnd(FIGURES) && toEnd());
}

export function toEnd(): void {
  window.scrollTo({ top: document.documentElement.scrollHeight });
}

export function followed<T>(change: () => T): T {
  const was = isAtEnd();
  const answer = change();
  if (was) toEnd();
  return answer;
}
