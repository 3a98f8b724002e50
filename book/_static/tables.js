// Small mercies for the tables that pandas prints: evidence words become chips, counts of bytes get their separators,
// text is set flush left where numbers are flush right, and the row that holds nothing but the index's name joins the
// header row above it.
document.addEventListener("DOMContentLoaded", () => {
  const evidence = new Set(["claimed", "computed", "traced", "measured", "recorded"]);
  const numeric = /^[-+−]?[\d.,  ]+(e[-+]?\d+)?\s*(%|B|[kMGT]i?B)?$|^–?$/;

  for (const cell of document.querySelectorAll("article tbody td, article tbody th")) {
    const words = cell.textContent.trim().split(", ");
    if (!words.every((word) => evidence.has(word))) continue;
    const chips = words.map((word) => {
      const chip = document.createElement("span");
      chip.className = `evidence evidence-${word}`;
      chip.textContent = word;
      return chip;
    });
    cell.replaceChildren(...chips.flatMap((chip, i) => (i ? [" ", chip] : [chip])));
  }

  for (const table of document.querySelectorAll("article table.dataframe")) {
    const [header, names] = table.tHead?.rows ?? [];
    const titled = names ? [...names.cells].filter((cell) => cell.textContent.trim()) : [];
    if (names && table.tHead.rows.length === 2 && [...header.cells].every((cell) => cell.colSpan === 1)
        && titled.every((cell) => !header.cells[cell.cellIndex].textContent.trim())) {
      for (const cell of titled) header.cells[cell.cellIndex].textContent = cell.textContent;
      names.remove();
    }

    // Counted from the right: a row label that spans several rows shortens the rows under it.
    const rows = [...(table.tBodies[0]?.rows ?? [])];
    const fromRight = (row, column) => row.cells[row.cells.length - 1 - column];
    const columns = Math.max(0, ...rows.map((row) => row.querySelectorAll("td").length));
    for (let column = 0; column < columns; column++) {
      const cells = rows.map((row) => fromRight(row, column));
      const title = fromRight(table.tHead.rows[0], column)?.textContent ?? "";
      if (/\b(n?bytes|claimed|computed|traced|measured|recorded|difference|growth)\b/i.test(title)) {
        for (const cell of cells.filter((cell) => cell && /^[-−]?\d+$/.test(cell.textContent.trim()))) {
          cell.textContent = cell.textContent.replace(/\B(?=(\d{3})+\s*$)/g, ",");
        }
      }
      if (cells.every((cell) => !cell || numeric.test(cell.textContent.trim()))) continue;
      const kinds = cells.some((cell) => cell?.textContent.trim().length > 24) ? ["text", "prose"] : ["text"];
      const heads = [...table.tHead.rows].map((row) => fromRight(row, column));
      for (const cell of [...cells, ...heads]) cell?.classList.add(...kinds);
    }
  }
});
