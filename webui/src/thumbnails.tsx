// Thumbnails of images, and one of them as large as the window lets it be.

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { unkept } from "./album";
import type { Picture } from "./picture";

const looked = signal<Picture | null>(null);

function Thumbnail({ picture, remove }: { picture: Picture; remove?: () => void }) {
  const { name, url, width, height } = picture;
  return (
    <li>
      {url ? (
        <button
          type="button"
          class="thumbnail"
          aria-label={`Enlarge ${name}`}
          title={`${name}, ${width} × ${height}`}
          onClick={() => (looked.value = picture)}
        >
          <img src={url} alt="" width={width} height={height} />
        </button>
      ) : (
        <span class="thumbnail lost">
          {name} <span class="muted">was not kept and is not sent</span>
        </span>
      )}
      {remove && (
        <button type="button" class="remove" aria-label={`Remove ${name}`} onClick={remove}>
          ×
        </button>
      )}
    </li>
  );
}

export function Thumbnails({ pictures, remove }: { pictures: Picture[]; remove?: (one: Picture) => void }) {
  if (!pictures.length) return null;
  return (
    <ul class="thumbnails" aria-label="Images">
      {pictures.map((one) => (
        <Thumbnail key={one.id} picture={one} remove={remove && (() => remove(one))} />
      ))}
    </ul>
  );
}

// Which of a message's images a reload will not bring back.
export function Unkept({ pictures }: { pictures: Picture[] }) {
  const names = pictures.filter(({ id }) => unkept.value.has(id)).map(({ name }) => name);
  if (!names.length) return null;
  return (
    <p class="note" role="status">
      Not kept, as this browser has no room for it: {names.join(", ")}. The rest of the chat is kept.
    </p>
  );
}

export function Enlarged() {
  const dialog = useRef<HTMLDialogElement>(null);
  const picture = looked.value;
  useEffect(() => {
    if (picture) dialog.current?.showModal();
  }, [picture]);
  if (!picture) return null;
  const { name, url, width, height } = picture;
  return (
    <dialog
      ref={dialog}
      class="enlarged"
      aria-label={name}
      onClose={() => (looked.value = null)}
      onClick={() => dialog.current?.close()}
    >
      <img src={url} alt={name} width={width} height={height} />
      <p>
        <span>
          {name}, {width} × {height}
        </span>
        <button type="button" class="quiet">
          Close
        </button>
      </p>
    </dialog>
  );
}
