"""What a browser is asked about a page: whether everybody can read it, in JavaScript."""

# Text under 4.5 : 1 against what lies behind it, by WCAG 2.2's relative luminance; colours of ancestors are laid one
# over another until one is opaque. What stands on a picture is left to the eye.
FAINT = """() => {
  const rgba = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
    return colour.startsWith("color(") ? [r * 255, g * 255, b * 255, a] : [r, g, b, a];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((x, i) => a * x + (1 - a) * under[i]);
  const linear = (x) => ((x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const luminance = (rgb) => rgb.reduce((sum, x, i) => sum + linear(x) * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const colour = rgba(getComputedStyle(element).backgroundColor);
    return colour[3] === 1 ? colour.slice(0, 3) : over(colour, behind(element.parentElement));
  };
  const faint = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode());) {
    const element = text.parentElement;
    if (!text.data.trim() || element.closest("mjx-assistive-mml, :disabled")) continue;
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const paper = behind(element);
    const ink = over(rgba(getComputedStyle(element).color), paper);
    const [dark, light] = [luminance(ink), luminance(paper)].sort((x, y) => x - y);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) faint.add([ratio.toFixed(2), element.tagName, element.className, text.data.trim()].join(" "));
  }
  return [...faint];
}"""

# axe is slow, and need not see all of what is made alike: a long table's rows beyond a dozen, the colours of code,
# whose contrast FAINT has looked at, the glyphs of mathematics, which are hidden from readers that listen.
SHORTEN = """() => {
  for (const element of document.querySelectorAll("tbody > tr:nth-child(n + 13), mjx-math")) element.remove();
  for (const token of document.querySelectorAll("pre span")) token.replaceWith(...token.childNodes);
}"""
AXE = """(rules) => axe.run(document, {
  resultTypes: ["violations"], preload: false, ...(rules && { runOnly: rules }),
}).then(({ violations }) => violations.filter(({ impact }) => impact === "serious" || impact === "critical")
  .map(({ id, nodes }) => `${id}: ${nodes.map(({ target }) => target.join(" ")).slice(0, 5).join(", ")}`))"""
OF_COLOUR = ["color-contrast", "link-in-text-block"]
