// A path of the server read again and again while a view shows it, and no longer than that.

import { signal, type Signal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import type { Failure } from "./failure";
import { read } from "./transport";

export interface Polled<T> {
  value: Signal<T | null>;
  at: Signal<number>; // milliseconds of the page's clock
  failure: Signal<Failure | null>;
}

export function usePolled<T>(path: string, everyMs: number): Polled<T> {
  const polled = useMemo(
    () => ({ value: signal<T | null>(null), at: signal(0), failure: signal<Failure | null>(null) }),
    [path],
  );
  useEffect(() => {
    let timer = 0;
    let isOver = false;
    const poll = async () => {
      if (!document.hidden) {
        try {
          const got = await read<T>(path);
          polled.at.value = performance.now();
          polled.value.value = got;
          polled.failure.value = null;
        } catch (error) {
          polled.failure.value = error as Failure;
        }
      }
      if (!isOver) timer = setTimeout(poll, everyMs);
    };
    void poll();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [path, everyMs]);
  return polled;
}
