"use strict";
// Readings under the pointer and under the keyboard, the theme, and the copy buttons. Without it the page is complete but still.
(() => {
  const tip = document.getElementById("tip");

  const units = { B: 1, KiB: 1024, MiB: 1024 ** 2, GiB: 1024 ** 3 };
  const bytes = (value) => {
    const [name, size] = Object.entries(units).reverse().find(([, size]) => Math.abs(value) >= size) ?? ["B", 1];
    return `${(value / size).toFixed(name === "B" ? 0 : 1)} ${name}`;
  };
  const number = (value) => value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 100 ? 2 : 0 });
  const written = { bytes, number };

  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  const place = (x, y) => {
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - height - 8))}px`;
  };
  const hide = () => { tip.hidden = true; };

  // ---- plots: one reading at a time
  for (const frame of document.querySelectorAll(".plot-frame")) {
    const plot = frame.querySelector(".plot");
    const cross = frame.querySelector(".cross");
    const figures = JSON.parse(frame.querySelector(".figures").textContent);
    const last = figures.at.length - 1;
    let now = last;
    if (last < 0) continue;

    const show = (position, y) => {
      now = Math.max(0, Math.min(last, position));
      const write = written[figures.unit];
      const known = figures.values.map((values) => values[now]);
      const list = element("dl");
      for (let layer = figures.names.length - 1; layer >= 0; layer--) {
        if (known[layer] === null) continue;
        list.append(element("span", "", `key ${figures.colours[layer]}`), element("dt", figures.names[layer]), element("dd", write(known[layer])));
      }
      if (figures.sum) {
        const sum = known.reduce((all, value) => all + (value ?? 0), 0);
        list.append(element("span", "", "sum"), element("span"), element("dt", "together"), element("dd", write(sum)));
      }
      tip.replaceChildren(element("strong", figures.heads[now]), list);
      const box = plot.getBoundingClientRect();
      cross.hidden = false;
      cross.style.left = `${100 * figures.at[now]}%`;
      plot.setAttribute("aria-valuenow", now);
      plot.setAttribute("aria-valuetext", `${figures.heads[now]}: ` + figures.names.map((name, layer) => (known[layer] === null ? "" : `${name} ${write(known[layer])}`)).filter(Boolean).join(", "));
      place(box.left + figures.at[now] * box.width, y ?? box.top + box.height / 3);
    };
    const leave = () => { cross.hidden = true; hide(); };
    const nearest = (share) => {
      let low = 0, high = last;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (figures.at[middle] < share) low = middle; else high = middle;
      }
      return share - figures.at[low] < figures.at[high] - share ? low : high;
    };
    const point = (event) => {
      const box = plot.getBoundingClientRect();
      show(nearest((event.clientX - box.left) / box.width), event.clientY);
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) show(now); });
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const wide = Math.max(1, Math.round(last / 20));
      const moves = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, PageDown: now - wide, PageUp: now + wide, Home: 0, End: last };
      if (event.key === "Escape") leave();
      else if (event.key in moves) { event.preventDefault(); show(moves[event.key]); }
    });
  }

  // ---- marks: one stop for the Tab key a chart, arrow keys within it
  for (const chart of document.querySelectorAll(".bars, .flags, .points")) {
    const marks = [...chart.querySelectorAll(".mark")];
    marks.forEach((mark, position) => {
      mark.setAttribute("tabindex", position ? "-1" : "0");
      const show = (x, y) => { tip.replaceChildren(...mark.dataset.tip.split("\n").map((line, at) => element(at ? "div" : "strong", line))); place(x, y); };
      mark.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
      mark.addEventListener("pointerleave", hide);
      mark.addEventListener("focus", () => {
        if (!mark.matches(":focus-visible")) return;
        const box = mark.getBoundingClientRect();
        show(box.left + box.width / 2, box.bottom - 6);
        mark.setAttribute("aria-describedby", "tip");
      });
      mark.addEventListener("blur", () => { hide(); mark.removeAttribute("aria-describedby"); });
      mark.addEventListener("keydown", (event) => {
        const to = { ArrowRight: position + 1, ArrowDown: position + 1, ArrowLeft: position - 1, ArrowUp: position - 1, Home: 0, End: marks.length - 1 }[event.key];
        if (event.key === "Escape") hide();
        if (to === undefined || !marks[to]) return;
        event.preventDefault();
        mark.setAttribute("tabindex", "-1");
        marks[to].setAttribute("tabindex", "0");
        marks[to].focus({ focusVisible: true });
      });
    });
  }

  // ---- theme
  const toggle = document.getElementById("theme");
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { toggle.textContent = isDark() ? "Light" : "Dark"; };
  const remembered = { // a file that was opened from a disk may have no storage
    get: () => { try { return localStorage.getItem("holdall-theme"); } catch { return null; } },
    set: (theme) => { try { localStorage.setItem("holdall-theme", theme); } catch { /* not kept */ } },
  };
  if (["light", "dark"].includes(remembered.get())) root.dataset.theme = remembered.get();
  name();
  toggle.hidden = false;
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered.set(root.dataset.theme);
    name();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);

  // ---- code
  for (const button of document.querySelectorAll(".copy")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
        button.textContent = "Copied";
      } catch { button.textContent = "Not copied"; }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
})();
