// What to try first. The demo model does three things to Python code.

export interface Example {
  title: string;
  note: string;
  prompt: string;
}

export const EXAMPLES: Example[] = [
  {
    title: "Rename a variable",
    note: "a long copy: easy to guess",
    prompt: `Rename \`items\` to \`entries\` in this function:
def group_by(items, key):
    """Collect items in lists by what key says about them."""
    groups = {}
    for item in items:
        name = key(item)
        if name not in groups:
            groups[name] = []
        groups[name].append(item)
    if not items:
        return {}
    return groups`,
  },
  {
    title: "Continue code",
    note: "new text: harder to guess",
    prompt: `Continue this code:
def read_lines(self, path, encoding='utf-8'):
    """Return the lines of a file as a list."""
    lines = []
    with open(path, encoding=encoding) as file:`,
  },
  {
    title: "Write a docstring",
    note: "short and free",
    prompt: `Write the docstring of this function:
def remove(self, name):
    if name not in self._entries:
        raise KeyError(name)
    entry = self._entries.pop(name)
    entry.close()
    return entry`,
  },
];
