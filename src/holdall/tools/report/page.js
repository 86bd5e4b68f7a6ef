"use strict";
// Draws the page from its description, the JSON in #page. Every text becomes a text node, so no text becomes markup.
(() => {
  const page = JSON.parse(document.getElementById("page").textContent);
  const tip = document.getElementById("tip");
  document.getElementById("unscripted").remove();
  const SIDE = 1000; // Side of the square in which a plot is drawn. The browser stretches it.
  const SIGNS = { good: "✓", info: "●", warning: "▲", error: "◆" };

  // ---- elements
  const isGiven = (value) => value !== null && value !== undefined && value !== "";
  const fill = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) node.setAttribute(name, "");
      else if (value !== false && isGiven(value)) node.setAttribute(name, value);
    }
    node.append(...children.filter(isGiven));
    return node;
  };
  const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const shape = (name, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  const insertBreaks = (text) => // Allows line breaks after punctuation inside a name.
    text.split(/(?<=[._/-])(?=\w)/).flatMap((part, at) => (at ? [element("wbr"), part] : [part]));
  const addSign = (tone, text) => [element("span", { "aria-hidden": "true" }, SIGNS[tone]), ` ${text}`];
  const percent = (share) => `${(100 * share).toFixed(2)}%`;

  // ---- values and scales
  const UNITS = [["GiB", 1024 ** 3], ["MiB", 1024 ** 2], ["KiB", 1024], ["B", 1]];
  const bytes = (value) => {
    const [name, size] = UNITS.find(([, size]) => Math.abs(value) >= size) ?? ["B", 1];
    return `${(value / size).toFixed(name === "B" ? 0 : 1)} ${name}`;
  };
  const number = (value) => {
    let digits = 0;
    if (Math.abs(value) < 10) digits = 2;
    else if (Math.abs(value) < 100) digits = 1;
    return value.toLocaleString("en", { maximumFractionDigits: digits });
  };
  const seconds = (value) => { // In the two largest units: 3 h 20 min.
    if (value < 60) return `${number(value)} s`;
    const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
    const first = units.findIndex(([, size]) => value >= size);
    const [name, size] = units[first];
    const [smallerName, smallerSize] = units[first + 1];
    const rest = Math.floor((value % size) / smallerSize);
    return `${Math.floor(value / size)} ${name}` + (rest ? ` ${rest} ${smallerName}` : "");
  };
  const write = { bytes, number, seconds };
  const DURATIONS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const roundUp = { // To the next round step between two ticks, by unit.
    bytes: (step) => 2 ** Math.ceil(Math.log2(step)),
    number: (step) => {
      const power = 10 ** Math.floor(Math.log10(step));
      return power * [1, 2, 5, 10].find((factor) => factor * power >= step * (1 - 1e-9));
    },
    seconds: (step) => DURATIONS.find((duration) => duration >= step) ?? 86400 * 2 ** Math.ceil(Math.log2(step / 86400)),
  };
  const makeScale = (largest, unit) => { // From zero. A scale of time ends with the data, any other scale with a tick.
    if (!(largest > 1e-6)) largest = 1;
    const step = roundUp[unit](largest / (unit === "seconds" ? 8 : 5));
    const count = unit === "seconds" ? Math.floor(largest / step + 1e-9) : Math.ceil(largest / step - 1e-9);
    const end = unit === "seconds" ? largest : count * step;
    const ticks = Array.from({ length: count + 1 }, (_, at) => at * step);
    const share = (value) => Math.min(Math.max(value / end, 0), 1);
    return { end, ticks, write: (value) => write[unit](value).replace(".0 ", " "), share };
  };
  const makeLimitedScale = (largest, limit, unit) => { // A limit far above the values would flatten them, so it is only named.
    if (!limit) return makeScale(largest, unit);
    const [value, , maxRatio] = limit;
    return makeScale(largest <= value && value <= maxRatio * largest ? value : largest, unit);
  };

  // ---- the tip
  const place = (x, y) => {
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - height - 8))}px`;
  };
  const hide = () => { tip.hidden = true; };
  const mark = (shaped, text) => { // Makes an element show `text` as its tip.
    const kind = `mark ${shaped.getAttribute("class")}`;
    return fill(shaped, { class: kind, role: "img", "aria-label": text, "data-tip": text }, []);
  };
  const connectMarks = (chart) => { // The Tab key stops once at each chart. Arrow keys move within the chart.
    const marks = [...chart.querySelectorAll(".mark")];
    marks.forEach((shaped, position) => {
      shaped.setAttribute("tabindex", position ? "-1" : "0");
      const show = (x, y) => {
        const lines = shaped.dataset.tip.split("\n");
        tip.replaceChildren(...lines.map((line, at) => element(at ? "div" : "strong", {}, line)));
        place(x, y);
      };
      shaped.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
      shaped.addEventListener("pointerleave", hide);
      shaped.addEventListener("focus", () => {
        if (!shaped.matches(":focus-visible")) return;
        const box = shaped.getBoundingClientRect();
        show(box.left + box.width / 2, box.bottom - 6);
      });
      shaped.addEventListener("blur", hide);
      shaped.addEventListener("keydown", (event) => {
        if (event.key === "Escape") hide();
        const next = position + 1;
        const previous = position - 1;
        const moves = { ArrowRight: next, ArrowDown: next, ArrowLeft: previous, ArrowUp: previous, Home: 0, End: marks.length - 1 };
        const target = marks[moves[event.key]];
        if (!target) return;
        event.preventDefault();
        shaped.setAttribute("tabindex", "-1");
        target.setAttribute("tabindex", "0");
        target.focus({ focusVisible: true });
      });
    });
    return chart;
  };

  // ---- blocks
  const legend = ({ keys }) => {
    if (keys.length < 2 && keys[0]?.[1] !== "dashed") return null;
    const items = keys.map(([name, colour]) => element("li", {}, element("span", { class: `key ${colour}` }), name));
    return element("ul", { class: "legend" }, ...items);
  };
  const limitKeys = (limit, scale) => {
    if (!limit) return [];
    const [value, name] = limit;
    return [[value <= scale.end ? name : `${name} (above the scale)`, "dashed"]];
  };
  const definitions = (pairs, attributes) => // A list of names with their values.
    element("dl", attributes, ...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));

  const tiles = (block) => element("dl", { class: "tiles" }, ...block.tiles.map((tile) =>
    element("div", { class: `tile ${tile.tone}` },
      element("dt", {}, tile.name),
      element("dd", {}, tile.value, tile.note && element("small", {}, tile.note)))));

  const cards = (block) => element("div", { class: "cards" }, ...block.cards.map((card) =>
    element("article", { class: `card ${card.tone}` },
      element("header", {},
        element("span", { class: "badge" }, ...addSign(card.tone, card.tone)),
        element("h3", {}, card.name),
        card.when && element("span", { class: "when" }, card.when)),
      card.text && element("p", {}, card.text),
      card.evidence.length ? definitions(card.evidence, { class: "evidence" }) : null,
      card.remedy && element("p", { class: "remedy" }, element("strong", {}, "Remedy: "), card.remedy))));

  const table = ({ heads, rows, caption, words, prose, fold }) => { // A short table becomes a list of its rows on a narrow page.
    const kind = (at) => {
      if (at < words) return "words";
      return prose && at === heads.length - 1 ? "words prose" : "";
    };
    const makeCell = (cell, at) => {
      const content = typeof cell === "string"
        ? [cell]
        : [element("span", { class: `said ${cell.tone}` }, ...addSign(cell.tone, cell.text))];
      if (at === 0) return element("th", { scope: "row", class: kind(at) }, ...content);
      return element("td", { class: kind(at), "data-head": heads[at] }, ...content);
    };
    const head = element("tr", {}, ...heads.map((text, at) => element("th", { scope: "col", class: kind(at) }, text)));
    const lines = rows.map((row) => element("tr", {}, ...row.map(makeCell)));
    const whole = element("table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...lines));
    const size = rows.length <= 12 ? "scroll short" : "scroll";
    const region = element("div", { class: size, tabindex: "0", role: "region", "aria-label": caption }, whole);
    return fold ? element("details", {}, element("summary", {}, fold), region) : region;
  };

  const axisTitle = (text, kind) => element("div", { class: `axis-title ${kind}` }, text);
  const yAxis = (scale) => element("div", { class: "y-axis", "aria-hidden": "true" },
    ...scale.ticks.map((value) => element("span", { style: `bottom:${percent(scale.share(value))}` }, scale.write(value))));
  const xAxis = (scale) => {
    const last = scale.ticks.length - 1;
    const stride = last % 2 && !(last % 3) ? 3 : 2; // On a narrow page every second or third tick is shown.
    return element("div", { class: "x-axis", "aria-hidden": "true" }, ...scale.ticks.map((value, at) => {
      const share = scale.share(value);
      const end = share < 0.005 ? "begin" : share > 0.995 ? "end" : "";
      return element("span", { class: `${end} ${at % stride ? "minor" : ""}`.trim(), style: `left:${percent(share)}` }, scale.write(value));
    }));
  };

  const plot = (block) => {
    const { layers, times, heads, limit, unit, label } = block;
    const last = times.length - 1;
    const sums = times.map((_, at) => layers.reduce((all, layer) => all + (layer.values[at] ?? 0), 0));
    const largest = Math.max(...(block.stacked ? sums : layers.flatMap((layer) => layer.values.map((value) => value ?? 0))));
    const y = makeLimitedScale(largest, limit, unit);
    const x = makeScale(times[last], "seconds");
    const down = (value) => (SIDE * (1 - y.share(value))).toFixed(1);
    const points = (positions, values) => positions.map((at) => `${(SIDE * x.share(times[at])).toFixed(1)},${down(values[at])}`).join(" ");
    const all = times.map((_, at) => at);
    const shapes = y.ticks.map((value) => shape("line", { x1: 0, x2: SIDE, y1: down(value), y2: down(value), class: "grid" }));
    const labels = [];
    let below = times.map(() => 0);
    for (const layer of layers) {
      if (!block.stacked) {
        const known = all.filter((at) => layer.values[at] !== null);
        shapes.push(shape("path", { d: `M${points(known, layer.values)}`, class: `curve ${layer.colour}` }));
        continue;
      }
      const top = below.map((value, at) => value + layer.values[at]);
      shapes.push(shape("path", { d: `M${points(all, top)} L${points([...all].reverse(), below)}Z`, class: `band ${layer.colour}` }));
      const height = y.share(layer.values[last]);
      if (height >= 0.09) { // Thick bands carry their names, so that a reader does not depend on colours.
        labels.push(element("span", { class: "band-name", style: `bottom:${percent(y.share(below[last]) + height / 2)}` }, layer.name));
      }
      below = top;
    }
    if (limit && limit[0] <= y.end) {
      shapes.push(shape("line", { x1: 0, x2: SIDE, y1: down(limit[0]), y2: down(limit[0]), class: "limit" }));
      const share = y.share(limit[0]);
      const side = share > 0.9 ? "below" : "above";
      labels.push(element("span", { class: `limit-label ${side}`, style: `bottom:${percent(share)}` }, limit[1]));
    }
    const listValues = (at) =>
      layers.filter((layer) => layer.values[at] !== null).map((layer) => [layer, y.write(layer.values[at])]);
    const describe = (at) => `${heads[at]}: ${listValues(at).map(([layer, text]) => `${layer.name} ${text}`).join(", ")}`;
    const cross = element("span", { class: "cross", hidden: true });
    const view = { viewBox: `0 0 ${SIDE} ${SIDE}`, preserveAspectRatio: "none", "aria-hidden": "true", focusable: "false" };
    const surface = element("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${label}. Arrow keys move through it.`,
      "aria-valuemin": "0", "aria-valuemax": `${last}`, "aria-valuenow": `${last}`, "aria-valuetext": describe(last) },
      shape("svg", view, ...shapes), ...labels, cross);

    let now = last;
    const show = (position, height) => { // Shows the reading at `position`, with the tip at `height`.
      now = Math.max(0, Math.min(last, position));
      const list = element("dl", {}, ...listValues(now).reverse().flatMap(([layer, text]) =>
        [element("span", { class: `key ${layer.colour}` }), element("dt", {}, layer.name), element("dd", {}, text)]));
      if (block.stacked && layers.length > 1) {
        const sum = element("dd", {}, y.write(sums[now]));
        list.append(element("span", { class: "sum" }), element("span"), element("dt", {}, "together"), sum);
      }
      tip.replaceChildren(element("strong", {}, heads[now]), list);
      const box = surface.getBoundingClientRect();
      cross.hidden = false;
      cross.style.left = percent(x.share(times[now]));
      fill(surface, { "aria-valuenow": `${now}`, "aria-valuetext": describe(now) }, []);
      place(box.left + x.share(times[now]) * box.width, height ?? box.top + box.height / 3);
    };
    const leave = () => { cross.hidden = true; hide(); };
    const point = (event) => {
      const box = surface.getBoundingClientRect();
      const wanted = ((event.clientX - box.left) / box.width) * x.end;
      const nearest = all.reduce((best, at) => (Math.abs(times[at] - wanted) <= Math.abs(times[best] - wanted) ? at : best), 0);
      show(nearest, event.clientY);
    };
    surface.addEventListener("pointermove", point);
    surface.addEventListener("pointerdown", point);
    surface.addEventListener("pointerleave", leave);
    surface.addEventListener("focus", () => { if (surface.matches(":focus-visible")) show(now); });
    surface.addEventListener("blur", leave);
    surface.addEventListener("keydown", (event) => {
      const leap = Math.max(1, Math.round(last / 20));
      const moves = {
        ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1,
        PageDown: now - leap, PageUp: now + leap, Home: 0, End: last,
      };
      if (event.key === "Escape") leave();
      else if (event.key in moves) { event.preventDefault(); show(moves[event.key]); }
    });

    const flags = block.flags.map(([time, tone, text]) =>
      mark(element("span", { class: `flag ${tone}`, style: `left:${percent(x.share(time))}` }, SIGNS[tone]), text));
    const ordered = block.stacked ? [...layers].reverse() : layers; // The legend begins with the highest band.
    const keys = [...ordered.map((layer) => [layer.name, layer.colour]), ...limitKeys(limit, y)];
    const frame = element("div", { class: "plot-frame" }, axisTitle(unit === "bytes" ? "memory" : label, "up"),
      flags.length ? connectMarks(element("div", { class: "flags" }, ...flags)) : null,
      yAxis(y), surface, xAxis(x), axisTitle("time since the first reading", "across"), legend({ keys }));
    const stride = Math.max(1, Math.ceil(last / 120));
    const chosen = all.filter((at) => at % stride === 0 || at === last);
    const writeValue = (value) => (value === null ? "-" : y.write(value));
    const figures = table({
      fold: "These figures as a table",
      caption: label,
      words: 1,
      heads: ["reading", ...layers.map((layer) => layer.name)],
      rows: chosen.map((at) => [heads[at], ...layers.map((layer) => writeValue(layer.values[at]))]),
    });
    return element("div", { class: block.small ? "small" : "" }, frame, figures);
  };

  const bars = ({ rows, limit, label, unit, begin, keys, is_dots: isDots }) => {
    const HEIGHT = 22;
    const sums = rows.map((row) => (row.pieces.length ? row.pieces.reduce((all, piece) => all + piece.value, -begin) : 0));
    const maxWhisker = isDots ? Infinity : 2 * Math.max(...sums); // A long whisker must not flatten all bars.
    const ends = rows.map((row, at) => Math.max(sums[at], row.interval ? Math.min(row.interval[1] - begin, maxWhisker) : 0));
    const largest = Math.max(...ends, 0);
    let scale = makeLimitedScale(largest, limit, unit);
    if (isDots) { // Points keep a distance from both ends of the scale, so that no point is cut off.
      const share = (value) => 0.02 + 0.96 * Math.min(Math.max(value / largest, 0), 1);
      scale = { ...makeScale(largest, unit), end: largest, share };
    }
    const lines = rows.map((row) => {
      const marks = [shape("rect", { width: "100%", height: HEIGHT, class: "track" })];
      let left = -begin;
      for (const piece of row.pieces) {
        const from = scale.share(left);
        const to = scale.share(left + piece.value);
        const drawn = isDots
          ? shape("circle", { cx: percent(to), cy: HEIGHT / 2, r: 6, class: piece.colour })
          : shape("rect", { x: percent(from), width: percent(to - from), height: HEIGHT, class: piece.colour });
        marks.push(mark(drawn, piece.tip));
        left += piece.value;
      }
      if (row.interval) {
        const [low, high] = row.interval.map((value) => percent(scale.share(value - begin)));
        const strokes = [[low, high, 11, 11], [low, low, 5, 17], [high, high, 5, 17]]; // The line and its two ends.
        for (const [x1, x2, y1, y2] of strokes) marks.push(shape("line", { x1, x2, y1, y2, class: "interval" }));
      }
      if (limit && limit[0] <= scale.end) {
        const x = percent(scale.share(limit[0]));
        marks.push(shape("line", { x1: x, x2: x, y1: 0, y2: HEIGHT, class: "limit" }));
      }
      return element("li", { class: row.is_strong ? "strong" : "" },
        element("div", { class: "bar-name" }, ...insertBreaks(row.name), row.note && element("small", {}, row.note)),
        element("div", { class: "bar-track" }, shape("svg", { height: HEIGHT, width: "100%", focusable: "false" }, ...marks)),
        element("div", { class: "bar-text" }, row.text));
    });
    return element("div", { class: "bar-chart" }, legend({ keys: [...keys, ...limitKeys(limit, scale)] }),
      connectMarks(element("ul", { class: "bars", "aria-label": label }, ...lines)));
  };

  const columns = (block) => element("div", { class: "columns" }, ...block.columns.map(([title, inner]) =>
    element("div", {}, title && element("h4", {}, title), draw(inner))));
  const list = (block) => element("ul", { class: "notes" }, ...block.items.map((item) => element("li", {}, item)));

  const kinds = { tiles, cards, table, plot, bars, legend, columns, list };
  const draw = (block) => kinds[block.kind](block);

  // ---- the page, and its theme
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const purpose = "Switch between the light and the dark theme";
  const toggle = element("button", { id: "theme", type: "button", "aria-label": purpose, title: purpose });
  const nameTheme = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };
  toggle.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
  nameTheme();
  const header = element("header", {},
    element("div", { class: "top" }, element("p", { class: "kind" }, element("strong", {}, "holdall"), ` ${page.kind}`), toggle),
    element("h1", {}, page.title), element("ul", { class: "facts" }, ...page.facts.map((fact) => element("li", {}, fact))));
  const sections = page.sections.map(({ title, lead, blocks }) => (title
    ? element("section", {}, element("h2", {}, title), lead && element("p", { class: "lead" }, lead), ...blocks.map(draw))
    : element("div", {}, ...blocks.map(draw))));
  const hatching = shape("path", { d: "M0 6 6 0", class: "hatching" });
  const pattern = shape("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, hatching);
  const definedShapes = shape("svg", { width: 0, height: 0, class: "defs", "aria-hidden": "true" }, shape("defs", {}, pattern));
  document.body.prepend(definedShapes, header, element("main", {}, ...sections));
})();
