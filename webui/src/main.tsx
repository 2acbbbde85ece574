import { render } from "preact";
import { App } from "./app";
import { readEntries } from "./history";
import { tintWhile } from "./paint";
import { watch } from "./server";
import { tinted } from "./settings";

const root = document.querySelector("#page") as HTMLElement;
root.replaceChildren();
render(<App />, root);
tintWhile(tinted);
void readEntries();
void watch();
