// A filter above the tables of claims: words, and verdicts; an address can ask for them, claims.html?verdict=unit+mix.
// Without this script all rows are shown. A table of other things says by its data what they are called.
document.addEventListener("DOMContentLoaded", () => {
  const tables = [...document.querySelectorAll("table.claims")];
  const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
  if (!rows.length) return;
  const { things = "claims", kind = "Verdict", usual = "holds", example = "cache, 84 MB, 4.8" } = tables[0].dataset;

  const bar = document.createElement("form");
  bar.className = "claims-filter";
  bar.setAttribute("role", "search");
  bar.setAttribute("aria-label", things[0].toUpperCase() + things.slice(1));
  bar.innerHTML = `
    <label>Words <input type="search" name="words" placeholder="${example}" autocomplete="off"></label>
    <label>${kind} <select name="verdict"><option value="">all</option><option value="!">all but ${usual}</option></select></label>
    <output aria-live="polite"></output>`;
  const { words, verdict } = bar.elements;
  for (const name of new Set(rows.map((row) => row.dataset.verdict).sort())) verdict.add(new Option(name));
  (tables.length > 1 ? tables[0].closest("section") : tables[0]).before(bar);

  const text = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const show = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const { verdict: found } = row.dataset;
      const fits = !verdict.value || (verdict.value === "!" ? found !== usual : found === verdict.value);
      row.hidden = !(fits && wanted.every((word) => text.get(row).includes(word)));
    }
    bar.querySelector("output").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} ${things}`;
  };
  bar.addEventListener("input", show);
  bar.addEventListener("submit", (event) => event.preventDefault());
  const asked = new URLSearchParams(location.search);
  words.value = asked.get("words") ?? "";
  verdict.value = asked.get("verdict") ?? "";
  if (verdict.selectedIndex < 0) verdict.value = "";
  show();
  // A link to a row must find it, whatever is filtered.
  window.addEventListener("hashchange", () => {
    const row = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (row?.hidden) {
      bar.reset();
      show();
      row.scrollIntoView();
    }
  });
});
