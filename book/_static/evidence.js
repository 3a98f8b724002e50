// A table cell that holds nothing but one of the five evidence words is shown as a chip, like the words in the prose.
document.addEventListener("DOMContentLoaded", () => {
  const words = new Set(["claimed", "computed", "traced", "measured", "recorded"]);
  for (const cell of document.querySelectorAll("article td, article th")) {
    const word = cell.textContent.trim();
    if (!words.has(word) || cell.closest("thead")) continue;
    const chip = document.createElement("span");
    chip.className = `evidence evidence-${word}`;
    chip.textContent = word;
    cell.replaceChildren(chip);
  }
});
