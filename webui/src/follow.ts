// The window stays at the end of a growing reply, unless the reader has scrolled away from it.

const NEAR = 60; // pixels

function isAtEnd(): boolean {
  const page = document.documentElement;
  return page.scrollHeight - window.scrollY - window.innerHeight < NEAR;
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
