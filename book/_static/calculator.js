// The calculator: fields, the address, and bars. What is counted comes from calculator-formulas.js, which is made of the
// library's formulas: FORMULAS has a function for each piece of a step, BOOK says which pieces are live at which moment.
(() => {
  const home = document.getElementById("calculator");
  if (!home) return;

  const words = BOOK.switches;
  const size = (name, label, help = "") => ({ name, label, help, least: 1 });
  const choice = (name, label, options, help = "") => ({ name, label, help, options });
  const GROUPS = {
    decoder: {
      Model: [
        choice("preset", "Model", [...Object.keys(BOOK.decoders), "of your own"]),
        size("layers", "Layers L"), size("hidden", "Hidden h"), size("heads", "Heads a"),
        size("kv_heads", "K and V heads"), size("inner", "Width of the MLP"), size("vocabulary", "Vocabulary V"),
        choice("mlp", "MLP", words.mlp), choice("biases", "Biases", words.biases), choice("head", "Output head", words.head),
        choice("positions", "Positions", words.positions), size("rows", "Position rows"),
      ],
      Step: [
        size("batch", "Batch b"), size("sequence", "Sequence s"), choice("dtype", "Dtype", Object.keys(BOOK.dtypes)),
        choice("attention", "Attention", words.attention), choice("dropout", "Dropout", words.dropout),
        choice("checkpoint", "Checkpointing", words.checkpoint), choice("loss", "Loss head", words.loss),
        choice("gradients", "Old gradients", words.gradients, "waiting: microbatches add up"),
      ],
      Optimizer: [
        choice("recipe", "Recipe", words.recipe), choice("implementation", "Adam's kernels", words.implementation),
        choice("sharding", "Sharding", words.sharding), size("gpus", "GPUs N"),
        choice("adapted", "LoRA on", words.adapted), size("rank", "LoRA rank"),
      ],
    },
    tft: {
      Features: [size("static", "Static"), size("observed", "Observed"), size("known", "Known in advance")],
      Model: [
        size("tft_hidden", "Hidden h"), size("tft_heads", "Heads a"), size("stack", "Networks in a stack"),
        size("quantiles", "Quantiles"), size("table", "Position rows"),
      ],
      Step: [size("tft_batch", "Batch b"), size("history", "History"), size("horizon", "Horizon")],
    },
  };
  const TOP = [
    choice("network", "Network", { decoder: "decoder (GPT, Llama)", tft: "Temporal Fusion Transformer" }),
    choice("gpu", "GPU", Object.fromEntries(Object.entries(BOOK.gpus).map(([key, gpu]) => [key, gpu.name.replace("NVIDIA ", "")]))),
  ];
  const first = Object.keys(BOOK.decoders)[0];
  const DEFAULTS = {
    network: "decoder", gpu: BOOK.gpu, preset: first, rows: 2048, ...BOOK.decoders[first], batch: 4, sequence: 2048,
    dtype: "bfloat16", attention: "eager", dropout: "on", checkpoint: "none", loss: "full", gradients: "cleared",
    recipe: "bf16, master copy", implementation: "foreach", sharding: "one GPU", gpus: 8, adapted: "all products", rank: 16,
    ...BOOK.tft.seed,
  };
  // The library's symbols.
  const SYMBOLS = {
    layers: "L", hidden: "h", heads: "a", kv_heads: "a_kv", inner: "d_ff", vocabulary: "V", rows: "p_max", batch: "b",
    sequence: "s", rank: "rank", gpus: "N",
  };
  const CATEGORIES = ["weights", "optimizer state", "gradients", "activations", "activations ~ s",
    "activations ~ s²", "loss and ends", "temporaries"];

  // ---- What is counted ----

  class Fault extends Error {
    constructor(field, message) { super(message); this.field = field; }
  }

  const sum = (terms) => Object.values(terms).reduce((x, y) => x + y, 0n);

  function checkDecoder(x) {
    if (x.hidden % x.heads) throw new Fault("heads", `must divide the hidden size, ${x.hidden}`);
    if (x.heads % x.kv_heads) throw new Fault("kv_heads", `must divide the heads, ${x.heads}`);
    if (x.positions === "learned" && x.sequence > x.rows) throw new Fault("sequence", `is longer than the position table, ${x.rows} rows`);
    if (x.loss === "chunked" && x.batch * x.sequence < BOOK.tokens) throw new Fault("loss", `cuts at least ${BOOK.tokens} tokens into chunks`);
    const gpu = BOOK.gpus[x.gpu];
    if (x.attention === "flash" && !gpu.flash) throw new Fault("attention", `has no flash kernel on ${gpu.name}: choose eager`);
    const fault = BOOK.mismatches[[x.dtype, x.recipe, x.sharding, x.attention].join("|")];
    if (fault) throw new Fault(...fault);
  }

  const piece = (name, switches, x) => FORMULAS[[name, switches.map((word) => x[word]).join("|")].join("|")];

  // { moments: { name: [[category, { term: bytes }]] }, counts, crossover } of a decoder's step
  function decoder(x) {
    checkDecoder(x);
    const sizes = { ...BOOK.dtypes[x.dtype] };
    for (const [field, symbol] of Object.entries(SYMBOLS)) sizes[symbol] = x[field];
    if (x.sharding === "one GPU") sizes.N = 1;
    const counts = {};
    for (const [symbol, switches] of Object.entries(BOOK.counts)) {
      counts[symbol] = sum(piece(symbol, switches, x)(sizes));
    }
    Object.assign(sizes, counts);
    const moments = {};
    for (const [moment, names] of Object.entries(BOOK.moments)) {
      const functions = names.map((name) => [BOOK.pieces[name].category, piece(name, BOOK.pieces[name].switches, x)]);
      if (functions.some(([, f]) => !f)) continue; // this step has no such moment
      moments[moment] = functions.map(([category, f]) => [category, f(sizes)]);
    }
    const parts = piece("parts", BOOK.parts, x)(sizes);
    return { moments, learned: counts.P, crossover: [parts["with s"], parts["with s squared"]] };
  }

  function tft(x) {
    if (x.tft_hidden % x.tft_heads) throw new Fault("tft_heads", `must divide the hidden size, ${x.tft_hidden}`);
    if (x.history + x.horizon > x.table) throw new Fault("table", `must be at least history and horizon, ${x.history + x.horizon}`);
    const sizes = { ...BOOK.tft.widths };
    for (const [field, symbol] of Object.entries(BOOK.tft.symbols)) sizes[symbol] = x[field];
    const moments = {};
    for (const [moment, categories] of Object.entries(BOOK.tft.moments)) {
      moments[moment] = categories.map((category) => [category, FORMULAS[`tft|${moment}|${category}`](sizes)]);
    }
    return { moments, learned: FORMULAS["tft parameters"](sizes), kept: sum(FORMULAS["tft kept"](sizes)) };
  }

  const bytes = (parts) => parts.reduce((all, [, terms]) => all + sum(terms), 0n);

  // The fullest moment, and what the GPU needs for it: beside tensors, two workspaces for matrix products.
  function peak(x) {
    const step = (x.network === "tft" ? tft : decoder)(x);
    const moment = Object.keys(step.moments).reduce((p, q) => (bytes(step.moments[q]) > bytes(step.moments[p]) ? q : p));
    const needed = bytes(step.moments[moment]) + 2n * BigInt(BOOK.gpus[x.gpu].workspace);
    return { ...step, moment, needed };
  }

  // The largest value of a field with which the step surely fits; 0 if none does.
  function largest(x, field) {
    const room = BigInt(BOOK.gpus[x.gpu].usable[0]);
    const fits = (value) => {
      const other = { ...x, [field]: value };
      if (field === "sequence") other.rows = Math.max(x.rows, value);
      if (field === "history") other.table = Math.max(x.table, value + x.horizon);
      try {
        return peak(other).needed <= room;
      } catch (error) {
        if (error instanceof RangeError) return false; // more than can be counted
        if (error instanceof Fault && error.field === "loss") return true; // too few tokens for chunks
        throw error;
      }
    };
    let low = 0, high = 1;
    while (high < 2 ** 40 && fits(high)) [low, high] = [high, 2 * high];
    while (high - low > 1) {
      const middle = Math.floor((low + high) / 2);
      if (fits(middle)) low = middle; else high = middle;
    }
    return low;
  }

  // ---- Words for numbers ----

  const grouped = (n) => n.toString().replace(/\B(?=(\d{3})+$)/g, ",");
  // n / unit to two places, rounded half up, exactly
  const places = (n, unit, digits = 2) => {
    const scale = 10n ** BigInt(digits);
    const shown = (2n * n * scale + unit) / (2n * unit);
    return `${grouped(shown / scale)}.${(shown % scale).toString().padStart(digits, "0")}`;
  };
  const GB = 10n ** 9n, GiB = 2n ** 30n;
  const most = (x, field) => grouped(largest(x, field)).replace(/^0$/, "0, not even one");
  const both = (n) => `${grouped(n)} B (${places(n, GB)} GB, ${places(n, GiB)} GiB)`;

  // ---- The page ----

  function make(tag, attributes = {}, ...inside) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...inside);
    return element;
  }

  const fields = {};
  function field({ name, label, help, options, least }) {
    const id = `c-${name}`;
    let input;
    if (options) {
      const pairs = Array.isArray(options) ? options.map((word) => [word, word]) : Object.entries(options);
      input = make("select", { id, name }, ...pairs.map(([value, text]) => make("option", { value }, text)));
    } else {
      input = make("input", { id, name, inputmode: "numeric", autocomplete: "off", maxlength: "15" });
    }
    const fault = make("span", { id: `${id}-fault`, class: "calculator-fault", role: "alert" });
    input.setAttribute("aria-describedby", help ? `${id}-help ${id}-fault` : `${id}-fault`);
    const parts = [make("label", { for: id }, label), input];
    if (help) parts.push(make("small", { id: `${id}-help` }, help));
    const box = make("div", { class: "calculator-field", "data-field": name }, ...parts, fault);
    fields[name] = { input, fault, box, label, least, values: options && [...input.options].map((o) => o.value) };
    return box;
  }

  const form = make("form", { "aria-label": "What is to be calculated" });
  form.append(make("div", { class: "calculator-row" }, ...TOP.map(field)));
  const networks = Object.entries(GROUPS).map(([network, groups]) => make("div", { "data-network": network },
    ...Object.entries(groups).map(([legend, group]) => make("fieldset", {}, make("legend", {}, legend),
      make("div", { class: "calculator-row" }, ...group.map(field))))));
  form.append(...networks);
  const verdict = make("p", { class: "calculator-verdict", role: "status" });
  const bars = make("div", { class: "calculator-bars" });
  const facts = make("dl", { class: "calculator-facts" });
  const table = make("div", { class: "pst-scrollable-table-container" });
  const result = make("div", {}, bars, facts, table);
  const copy = make("button", { type: "button" }, "Copy the address of this setting");
  const copied = make("span", { role: "status" });
  home.replaceChildren(form, verdict, result, make("p", {}, copy, " ", copied));

  // What the fields say. A size is a whole number, perhaps with separators.
  function read() {
    const x = {};
    for (const [name, { input, values, least }] of Object.entries(fields)) {
      if (values) { x[name] = input.value; continue; }
      const used = input.closest("[data-network]").hidden === false && !input.closest(".calculator-field").hidden;
      const text = input.value.trim().replace(/(?<=\d)[,_ ](?=\d{3}(\D|$))/g, "");
      const number = /^\d+$/.test(text) ? Number(text) : NaN;
      if (number >= least && number <= 2 ** 40) x[name] = number;
      else if (used) throw new Fault(name, `must be a whole number from ${least} to 2^40`);
      else x[name] = DEFAULTS[name];
    }
    return x;
  }

  // Which fields have a meaning in this setting.
  function relevant() {
    const value = (name) => fields[name].input.value;
    networks.forEach((box) => { box.hidden = box.dataset.network !== value("network"); });
    fields.rows.box.hidden = value("positions") !== "learned";
    fields.gpus.box.hidden = value("sharding") === "one GPU";
    fields.adapted.box.hidden = fields.rank.box.hidden = !value("recipe").includes("LoRA");
  }

  function named() {
    const name = Object.keys(BOOK.decoders).find((preset) => Object.entries(BOOK.decoders[preset])
      .every(([field, value]) => fields[field].input.value.replace(/[,_ ]/g, "") === String(value)));
    fields.preset.input.value = name ?? "of your own";
  }

  function fail(field, message) {
    const { input, fault, label } = fields[field] ?? fields.network;
    input.setAttribute("aria-invalid", "true");
    fault.textContent = message;
    verdict.className = "calculator-verdict calculator-none";
    verdict.textContent = `No result: ${label} ${message}.`;
    result.hidden = true;
  }

  const NAMES = { optimizer: "The optimizer's step", backward: "Backward, at the selection's gradients" };
  const title = (moment) => NAMES[moment] ?? moment[0].toUpperCase() + moment.slice(1);

  // The fullest moment of each kind: of those in the loss head, in the last layer, in the first.
  function shown({ moments }) {
    const fullest = {};
    for (const [name, parts] of Object.entries(moments)) {
      const kind = name.split(": ")[0];
      if (!(kind in fullest) || bytes(parts) > bytes(moments[fullest[kind]])) fullest[kind] = name;
    }
    return Object.values(fullest);
  }

  function draw(x) {
    const step = peak(x);
    const [least, room] = BOOK.gpus[x.gpu].usable.map(BigInt);
    const { needed } = step;
    const name = BOOK.gpus[x.gpu].name;
    const [kind, text] = needed <= least
      ? ["fits", `Fits on ${name}: ${both(needed)} needed, ${both(least - needed)} left.`]
      : needed > room
        ? ["none", `Does not fit on ${name}: ${both(needed)} needed, ${both(needed - room)} too much.`]
        : ["tight", `May fit on ${name}: ${both(needed)} needed, and a CUDA context leaves ${both(least)} to ${both(room)}.`];
    verdict.className = `calculator-verdict calculator-${kind}`;
    verdict.textContent = text;

    const scale = [needed, room, ...Object.values(step.moments).map(bytes)].reduce((p, q) => (p > q ? p : q));
    const width = (n) => `${Number((n * 100_000n) / scale) / 1000}%`;
    bars.replaceChildren(...shown(step).map((moment) => {
      const parts = {};
      for (const [category, terms] of step.moments[moment]) parts[category] = (parts[category] ?? 0n) + sum(terms);
      const strips = CATEGORIES.filter((c) => parts[c]).map((c) => {
        const strip = make("span", { class: "calculator-strip", "data-category": c, title: `${c}: ${both(parts[c])}` });
        strip.style.width = width(parts[c]);
        return strip;
      });
      const limit = make("span", { class: "calculator-limit" });
      limit.style.left = width(least);
      const said = CATEGORIES.filter((c) => parts[c]).map((c) => `${c} ${places(parts[c], GB)} GB`).join(", ");
      const bar = make("div", { class: "calculator-bar", role: "img", "aria-label": `${title(moment)}: ${said}` }, ...strips, limit);
      const head = make("div", { class: "calculator-head" }, make(moment === step.moment ? "strong" : "span", {},
        `${title(moment)}${moment === step.moment ? ": the peak" : ""}`), ` ${both(bytes(step.moments[moment]))}`);
      return make("div", { "data-moment": moment }, head, bar);
    }));
    const present = new Set(Object.values(step.moments).flat().filter(([, terms]) => sum(terms)).map(([category]) => category));
    bars.append(make("p", { class: "calculator-legend" }, ...CATEGORIES.filter((c) => present.has(c)).map((c) =>
      make("span", {}, make("span", { class: "calculator-key", "data-category": c }), c)),
      make("span", {}, make("span", { class: "calculator-key calculator-line" }), "what the GPU surely has")));

    const entries = [["Parameters", "learned", grouped(step.learned)]];
    if (x.network === "decoder") {
      const [linear, quadratic] = step.crossover;
      entries.push(["Width of a head", "width", grouped(x.hidden / x.heads)]);
      entries.push(["Crossover", "crossover", quadratic
        ? `${places(linear, quadratic, 1)} tokens: beyond, a layer keeps more that grows with s² than with s`
        : "none: nothing that a layer keeps grows with s²"]);
      entries.push(["Longest sequence that fits", "sequence", most(x, "sequence")]);
      entries.push(["Largest batch that fits", "batch", most(x, "batch")]);
    } else {
      entries.push(["Kept between forward and backward", "kept", both(step.kept)]);
      entries.push(["Longest history that fits", "history", most(x, "history")]);
      entries.push(["Largest batch that fits", "batch", most(x, "tft_batch")]);
    }
    facts.replaceChildren(...entries.flatMap(([term, key, text]) =>
      [make("dt", {}, term), make("dd", { "data-fact": key }, text)]));

    const row = (cells, tag = "td") => make("tr", {}, ...cells.map((cell, i) =>
      make(i ? tag : "th", { scope: tag === "th" ? "col" : "row" }, cell)));
    const body = make("tbody");
    for (const [category, terms] of step.moments[step.moment]) {
      for (const [term, n] of Object.entries(terms)) {
        body.append(row([term, category, grouped(n), places(n, GB), places(n, GiB)]));
      }
    }
    body.append(row(["workspaces of cuBLAS, two", "beside tensors", grouped(2 * BOOK.gpus[x.gpu].workspace),
      places(2n * BigInt(BOOK.gpus[x.gpu].workspace), GB), places(2n * BigInt(BOOK.gpus[x.gpu].workspace), GiB)]));
    const total = row(["needed", "", grouped(needed), places(needed, GB), places(needed, GiB)]);
    total.className = "calculator-total";
    body.append(total);
    table.replaceChildren(make("table", { class: "table" }, make("caption", {}, `Live at the peak: ${title(step.moment)}`),
      make("thead", {}, row(["what", "kind", "bytes", "GB", "GiB"], "th")), body));
    result.hidden = false;
  }

  function update() {
    relevant();
    for (const { input, fault } of Object.values(fields)) {
      input.removeAttribute("aria-invalid");
      fault.textContent = "";
    }
    try {
      draw(read());
    } catch (error) {
      if (error instanceof Fault) fail(error.field, error.message);
      else if (error instanceof RangeError) fail("network", "as set needs more bytes than PyTorch can count, 2^63 - 1: choose smaller sizes");
      else throw error;
    }
  }

  // The address has what differs from the default.
  function write() {
    const said = new URLSearchParams();
    for (const [name, { input }] of Object.entries(fields)) {
      if (name !== "preset" && input.value !== String(DEFAULTS[name])) said.set(name, input.value);
    }
    history.replaceState(null, "", said.size ? `#${said}` : location.pathname.split("/").pop() + location.search);
  }

  function set(values) {
    for (const [name, value] of Object.entries(values)) fields[name].input.value = String(value);
  }

  function fromAddress() {
    const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    set(DEFAULTS);
    const unknown = Object.entries(asked).filter(([name]) => name in fields && name !== "preset")
      .filter(([name, value]) => { fields[name].input.value = value; return fields[name].input.value !== value; });
    for (const [name] of unknown) fields[name].input.value = String(DEFAULTS[name]);
    named();
    update();
    if (unknown.length) fail(unknown[0][0], `has no "${unknown[0][1].slice(0, 40)}": choose one of the list`);
  }

  form.addEventListener("input", (event) => {
    const preset = BOOK.decoders[event.target.value];
    if (event.target.name === "preset" && preset) {
      set({ rows: DEFAULTS.rows, ...preset });
      const longest = preset.positions === "learned" ? preset.rows : Infinity;
      if (Number(fields.sequence.input.value) > longest) set({ sequence: longest });
    }
    if (event.target.name !== "preset") named();
    copied.textContent = "";
    update();
    write();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", fromAddress);
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      copied.textContent = "copied";
    } catch {
      copied.textContent = location.href; // a page from a file may not write there
    }
  });
  fromAddress();
})();
