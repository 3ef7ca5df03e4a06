// The frame of all pages: where we are, whether it is live, who we are.
import {render} from './lit-html.js';
import {html, nothing, app, watch, redraw, call, go, dismiss, clock, report, enc, toast, isLive} from './core.js';
import * as pages from './pages.js';
import * as more from './more.js';
import {dialog} from './actions.js';

const TABS = [['', 'Overview', 'o'], ['requests', 'Requests', 'r'], ['levels', 'Levels', 'l'], ['workers', 'Workers', 'w'], ['timeline', 'Timeline', 't'], ['health', 'Health', 'h'], ['log', 'Log', 'g']];

function place() {
	if (report) return {request: report.id, tab: ''};
	const [, kind, name, tab = ''] = location.pathname.split('/').map(decodeURIComponent);
	const only = app.me?.only; // who came by a link sees one request
	if (only) return {request: only, tab: name === only ? tab : ''};
	const queue = kind === 'q' && name ? name : app.queue || app.me?.queues[0] || 'default';
	if (kind === 'r' && name) return {request: name, tab, queue: app.frames[`r:${name}`]?.status?.queue || queue};
	if (kind && kind !== 'q') return {missing: true, queue};
	return {queue, tab};
}
function content(at) {
	if (at.request && ['', 'failures', ...(app.me?.only ? [] : ['running', 'log'])].includes(at.tab)) return [pages.requestTopics(at.request, at.tab), () => pages.request(at.request, at.tab)];
	if (at.missing || at.request) return [[], () => html`<section class="card empty"><h1>There is no such page</h1><p><a href="/">Overview</a></p></section>`];
	const {queue} = at;
	if (app.me?.queues.includes(queue)) app.queue = queue;
	return {
		'': [pages.overviewTopics(queue), () => pages.overview(queue)],
		requests: [pages.requestsTopics(queue), () => pages.requests(queue)],
		levels: [[`v:${queue}`], () => more.levels(queue)],
		workers: [[`w:${queue}`], () => more.workers(queue)],
		timeline: [[`x:${queue}`], () => more.timeline(queue)],
		health: [[`h:${queue}`], () => more.health(queue)],
		log: [[`l:${queue}`], () => more.log(queue)],
	}[at.tab] || content({missing: true});
}
function state() {
	const texts = {
		live: ['live', 'live'], connecting: ['wait', 'connecting'], polling: ['wait', 'every 2 s: a proxy holds the stream back'], hidden: ['wait', 'paused while hidden'],
		away: ['away', `gateway away${app.seen ? `, last seen ${clock(app.seen, true)}` : ''}`], server: ['away', 'the server does not answer'],
	};
	const [kind, text] = texts[app.state] || ['wait', app.state];
	return html`<span class="state ${kind}" role="status"><i class="dot"></i>${text}</span>`;
}
function theme() {
	const data = document.documentElement.dataset, now = data.theme || '';
	const next = {'': 'dark', dark: 'light', light: ''}[now];
	const set = () => { next ? (data.theme = next) : delete data.theme; try { localStorage.setItem('theme', next); } catch {} redraw(); };
	return html`<button class="small" @click=${set} aria-label="theme: ${now || 'as the system'}; change">${{'': '◐', dark: '●', light: '○'}[now]}</button>`;
}
function login() {
	const enter = async event => {
		event.preventDefault();
		try {
			await call('POST', '/v1/session', {key: event.target.elements.key.value.trim()});
			app.loginError = '';
			await begin();
		} catch (error) { app.loginError = error.message; redraw(); }
	};
	return html`<main class="login"><section class="card"><form @submit=${enter}><h1>streamq</h1><p class="dim">This gateway asks for a key.</p><label>Key<input name="key" type="password" autocomplete="current-password" required></label>${app.loginError ? html`<p role="alert" class="chip fail">${app.loginError}</p>` : ''}<button class="primary">Log in</button></form></section></main>`;
}
function frame() {
	if (app.state === 'login' || (!app.me && !report)) return app.state === 'login' ? login() : html`<p class="plain dim">${app.state === 'away' ? 'the gateway does not answer; trying again' : ''}</p>`;
	const at = place(), [topics, show] = content(at);
	watch(topics);
	const old = app.state !== 'report' && (app.state === 'away' || app.state === 'server');
	const queues = app.me?.queues || [];
	const one = app.frames[`r:${at.request}`]?.status;
	const name = at.request || (TABS.find(([tab]) => tab === at.tab)?.[1] ?? 'streamq');
	document.title = `${one && !isLive(one) ? `${one.state}: ` : ''}${name} · streamq`;
	return html`<a class="skip" href="#main">to the content</a>
	<header class="top"><div class="bar"><a class="brand" href="/">${icon ? html`<img src=${icon} alt="">` : ''}streamq</a>
		${queues.length > 1 ? html`<label><span class="visually-hidden">queue</span><select @change=${event => go(`/q/${enc(event.target.value)}`)}>${queues.map(each => html`<option .selected=${each === at.queue}>${each}</option>`)}</select></label>` : ''}
		${report ? html`<span class="dim">report of ${clock(report.t, true)}</span>` : app.me.only ? nothing : html`<nav class="main" aria-label="pages">${[...TABS].map(([tab, text]) => html`<a href=${tab ? `${pages.q(at.queue)}/${tab}` : pages.q(at.queue)} aria-current=${!at.request && at.tab === tab ? 'page' : nothing}>${text}</a>`)}</nav>`}
		<span class="grow"></span>${report ? nothing : state()}${theme()}${app.me && !report ? html`<span class="dim small" title="version ${app.me.version}">${app.me.name} · ${app.me.role}</span>` : ''}${app.me?.session ? html`<button class="small" @click=${async () => { await call('DELETE', '/v1/session'); location.reload(); }}>log out</button>` : ''}</div></header>
	<main id="main" class=${old ? 'stale' : ''}>${show()}</main>
	<div class="toasts" role="status">${app.toasts.map(each => html`<div class="toast ${each.bad ? 'bad' : ''}"><span class="grow">${each.says}</span>${each.undo ? html`<button class="small" @click=${() => { dismiss(each); each.undo(); }}>undo</button>` : ''}</div>`)}</div>
	${dialog()}`;
}
const icon = document.querySelector('link[rel=icon]')?.href;
const root = document.getElementById('app');
let path = '';
app.draw = () => {
	render(frame(), root);
	if (path !== location.pathname) root.querySelector('nav [aria-current]')?.scrollIntoView({block: 'nearest', inline: 'center'});
	path = location.pathname;
	const box = root.querySelector('dialog');
	if (box && !box.open) box.showModal();
};
// Keys: ? tells them.
let pending = 0;
document.addEventListener('keydown', event => {
	if (report || event.target.matches?.('input, select, textarea') || event.ctrlKey || event.metaKey || event.altKey || app.dialog) return;
	const at = place();
	if (pending && Date.now() - pending < 1200) {
		const tab = TABS.find(([, , key]) => key === event.key);
		pending = 0;
		if (tab) go(tab[0] ? `${pages.q(at.queue)}/${tab[0]}` : pages.q(at.queue));
		return;
	}
	if (event.key === 'g') pending = Date.now();
	if (event.key === '?') toast('g o, g r, g l, g w, g t, g h: pages · / search · j, k: next and previous request', {seconds: 12});
	if (event.key === '/') { event.preventDefault(); if (at.tab !== 'requests') go(`${pages.q(at.queue)}/requests`); setTimeout(() => document.getElementById('search')?.focus(), 60); }
	if (event.key === 'j' || event.key === 'k') {
		const links = [...document.querySelectorAll('td a.id')], now = links.indexOf(document.activeElement);
		links[Math.max(0, Math.min(links.length - 1, now + (event.key === 'j' ? 1 : -1)))]?.focus();
	}
});
async function begin() {
	if (report) { app.frames = report.frames; app.points = report.points; redraw(); return; }
	try {
		app.me = await call('GET', '/v1/me');
		if (app.state !== 'live') app.state = 'connecting';
	} catch (error) {
		app.state = error.status === 401 || error.status === 403 ? 'login' : 'away';
		if (app.state === 'away') setTimeout(begin, 1500);
	}
	redraw();
}
try { const kept = localStorage.getItem('theme'); if (kept) document.documentElement.dataset.theme = kept; } catch {}
begin();
