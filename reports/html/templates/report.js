"use strict";
(() => {
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;
  const recall = () => { try { return localStorage.getItem("attncheck-theme"); } catch { return null; } };
  const remember = (theme) => { try { localStorage.setItem("attncheck-theme", theme); } catch { /* a file may keep nothing */ } };
  const show = (theme) => { if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme; };
  let theme = THEMES.includes(recall()) ? recall() : "auto";
  show(theme);  // before anything is painted

  const byId = (id) => document.getElementById(id);

  function themeButton() {
    const button = byId("theme");
    const label = () => { button.textContent = `Theme: ${theme}`; };
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      show(theme); remember(theme); label();
    });
    label();
    button.hidden = false;
  }

  function openTarget() {
    const id = location.hash.slice(1);
    const target = id && byId(id);
    if (!target) return;
    for (let inside = target; inside; inside = inside.parentElement) if (inside.tagName === "DETAILS") inside.open = true;
    const own = target.closest("details.case");
    (own && own.id !== id && target.tagName === "TBODY" ? target : own || target).scrollIntoView();
    if (own) own.querySelector("summary").focus({ preventScroll: true });
  }

  function copyButtons() {
    for (const block of document.querySelectorAll("pre.command")) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Copy";
      button.setAttribute("aria-label", `Copy: ${block.textContent}`);
      button.addEventListener("click", () => copy(block.querySelector("code"), button));
      block.append(button);
    }
  }

  function downloads() {
    for (const block of document.querySelectorAll("pre.script")) {
      const link = document.createElement("a");
      link.download = block.dataset.name;
      link.textContent = `Download ${block.dataset.name}`;
      link.href = "#";
      link.addEventListener("click", () => {
        link.href = `data:text/x-python;charset=utf-8,${encodeURIComponent(block.textContent)}`;
      });
      block.before(link);
    }
  }

  async function copy(code, button) {
    let done = true;
    try { await navigator.clipboard.writeText(code.textContent); } catch {
      getSelection().selectAllChildren(code);
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Select and copy";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  function filters() {
    const form = byId("filters");
    const hiding = document.head.appendChild(document.createElement("style"));
    const rows = [...document.querySelectorAll("#matrix tbody tr")].map((element) => ({
      element, name: element.cells[0].textContent.toLowerCase(),
      tags: element.dataset.t.split(" "), dtypes: element.dataset.d.split(" "), all: element.querySelector("td[colspan]"),
    }));
    const columns = [...document.querySelectorAll("#f-column option")].slice(1).map((option) => option.textContent);
    const first = document.querySelector("#matrix thead tr");
    const frameworks = first ? [...first.cells].slice(1).map((cell) => cell.dataset.f) : [];
    const value = (name) => byId(`f-${name}`).value;

    const matches = (part, wanted) => {
      const [kind, word] = [wanted.slice(0, wanted.indexOf(":")), wanted.slice(wanted.indexOf(":") + 1)];
      return kind === "any" ? part.classList.contains(word) : part.dataset.v === word;
    };
    const hasVerdict = (row, shown, dtype, wanted) => shown.some((number) => {
      const cell = row.all || row.element.cells[number + 1];
      const parts = cell.dataset.v === undefined ? [...cell.querySelectorAll("[data-v]")] : [cell];
      return parts.some((part) => (!dtype || !part.dataset.d || part.dataset.d.split(" ").includes(dtype)) && matches(part, wanted));
    });

    function apply() {
      const [text, framework, column, dtype, tag, verdict] =
        ["text", "framework", "column", "dtype", "tag", "verdict"].map(value);
      const wanted = text.trim().toLowerCase();
      const shown = columns.map((_, number) => number)
        .filter((number) => (!framework || frameworks[number] === framework) && (!column || Number(column) === number));
      const hidden = columns.map((_, number) => number).filter((number) => !shown.includes(number));
      hiding.textContent = hidden.map((number) => `.matrix tr > :nth-child(${number + 2}):not([colspan]){display:none}`).join("")
        + (dtype ? `.matrix [data-v][data-d]:not([data-d~="${dtype}"]){display:none!important}` : "");
      let count = 0;
      for (const row of rows) {
        const good = (!wanted || row.name.includes(wanted)) && (!tag || row.tags.includes(tag))
          && (!dtype || row.dtypes.includes(dtype)) && (!verdict || hasVerdict(row, shown, dtype, verdict));
        row.element.hidden = !good;
        if (row.all) row.all.colSpan = Math.max(1, shown.length);
        count += good;
      }
      for (const file of document.querySelectorAll(".file")) {
        const own = file.querySelector("tbody");
        file.hidden = own !== null && !own.querySelector("tr:not([hidden])");
      }
      const all = Number(byId("matrix").dataset.all);
      const listed = all > rows.length ? ` listed cases (${all.toLocaleString("en")} in all)` : " cases";
      byId("shown").textContent = `${count.toLocaleString("en")} of ${rows.length.toLocaleString("en")}${listed}, `
        + `${shown.length} of ${columns.length} implementations shown`;
    }
    form.addEventListener("input", apply);
    form.addEventListener("reset", () => setTimeout(apply));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
    apply();
  }

  function caseTools() {
    const urgent = "details.case.failing, details.case.misprint, details.case.xpass, details.case.xfail";
    byId("open-wrong").hidden = !document.querySelector(urgent);
    byId("open-wrong").addEventListener("click", () => {
      for (const one of document.querySelectorAll(urgent)) one.open = true;
    });
    byId("close-all").addEventListener("click", () => {
      for (const one of document.querySelectorAll("details.case[open]")) one.open = false;
    });
    byId("case-tools").hidden = false;
    addEventListener("beforeprint", () => {
      for (const one of document.querySelectorAll("details.case.failing")) one.open = true;
    });
  }

  // Text in a noscript element is no part of the page until it is put there: without a script all of it is shown.
  function lateComputations() {
    const put = (details) => {
      const late = details.querySelector(":scope > noscript");
      if (late) late.outerHTML = late.textContent;
    };
    const all = [...document.querySelectorAll("details.computation:has(> noscript)")];
    const near = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting && target.open) { put(target); near.unobserve(target); }
    }, { rootMargin: "1000px" });
    for (const one of all) {
      one.addEventListener("toggle", () => { if (one.open) near.observe(one); });
      if (one.open) near.observe(one);
    }
    addEventListener("beforeprint", () => { for (const one of all) if (one.open) put(one); });
  }

  addEventListener("DOMContentLoaded", () => {
    lateComputations(); themeButton(); copyButtons(); downloads(); filters(); caseTools(); openTarget();
    addEventListener("hashchange", openTarget);
  });
})();
