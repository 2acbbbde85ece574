// Copying, and saying on the button that it was done.

const SHOWN_MS = 1500;
const labels = new WeakMap<HTMLButtonElement, string>(); // of buttons that say something else, or did

// Pages without TLS that are not on loopback have no clipboard of their own; the old way works there.
async function copy(text: string): Promise<void> {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "hidden";
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (!isCopied) throw new Error("not allowed");
}

export async function copied(text: string, button: HTMLButtonElement): Promise<void> {
  const label = labels.get(button) ?? button.textContent ?? "";
  labels.set(button, label);
  const said = await copy(text).then(
    () => "Copied",
    () => "Not allowed",
  );
  button.textContent = said;
  setTimeout(() => {
    if (button.textContent === said) button.textContent = label;
  }, SHOWN_MS);
}
