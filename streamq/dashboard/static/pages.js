// The overview of a queue, its requests, and one request.
import {html, nothing, app, num, short, speed, percent, span, clock, ago, plural, bytes, chip, progress, command, call, act, go, param, withQuery, mayChange, isLive, here, report, redraw, heads, n, dim, btn, enc, card, flat, key, pathOf, ask, shown} from './core.js';
import {lines, speeds, spark, numbers} from './charts.js';
import * as actions from './actions.js';

export const q = queue => `/q/${enc(queue)}`;
// A stage of a flow is called ID/2, and is shown on the page of its request.
export const r = id => `/r/${enc(id.split('/')[0])}`;

function tile(k, v, n, share) {
	return html`<section class="card tile"><div class="k">${k}</div><div class="v">${v}</div>${n ? html`<div class="n">${n}</div>` : ''}${share == null ? nothing : html`<div class="meter" role="img" aria-label="${percent(share, 1)}"><i .style=${`width:${Math.min(100, 100 * share)}%`}></i></div>`}</section>`;
}
const unreadNote = frame => (frame.unread ? dim(`≈ ${num(frame.unread)} more are still being read`) : frame.age_ms > 5000 ? dim(`up to ${span(frame.age_ms)} old`) : nothing);
export function eta(row) {
	if (row.eta_s == null || row.paused) return '–';
	return html`<span title=${clock(here() + row.eta_s * 1e3, true)}>${span(row.eta_s * 1e3)}</span>`;
}

// Overview

export const overviewTopics = queue => [`q:${queue}`];
export function overview(queue) {
	const [frame, not] = shown(`q:${queue}`);
	if (not) return not;
	const {requests, parts, slots} = frame, points = app.points[`q:${queue}`] || [];
	if (!frame.open && !frame.workers) return empty(queue);
	const flow = speeds(points), current = flow.length ? flow.at(-1)[1] : frame.rate;
	return html`<h1>${queue} ${unreadNote(frame)}</h1>
	<div class="tiles">
		${tile('Requests', num(frame.open), [[requests.open, 'open'], [requests.loading, 'loading'], [requests.paused, 'paused']].filter(([n]) => n).map(([n, word]) => `${num(n)} ${word}`).join(' · ') || 'none')}
		${tile('Parts waiting', short(parts.waiting), `${num(parts.running)} running · ${num(parts.retry)} in retry · ${num(parts.failed)} failed`)}
		${tile('Slots busy', html`${num(slots.busy)} ${dim(`/ ${num(slots.total)}`, '')}`, `${plural(frame.workers, 'worker')} · ${num(slots.wanted)} wanted`, slots.total ? slots.busy / slots.total : 0)}
		${tile('Speed', speed(current), 'records finished, lately')}
	</div>
	${frame.notices.length ? card('Needs attention', dim(plural(frame.notices.length, 'thing')), frame.notices.map(each => html`<div class="notice ${['failing', 'still', 'canary', 'late'].includes(each.code) ? '' : 'alarm'}"><span class="mark" aria-hidden="true">▲</span><span>${each.request ? html`<a href=${r(each.request)}><b>${each.request}</b></a>: ` : ''}${each.says}</span>${dim(each.code === 'failing' ? html`<a href="${r(each.request)}/failures">see its failures</a>` : each.remedy)}</div>`), 'flat') : ''}
	${card('Requests by slots in use', html`<a class="small" href="${q(queue)}/requests">all ${num(frame.open)}</a>`, table(frame.top, {brief: true}), 'flat')}
	<div class="grid even">
		${card('Records finished a second', dim(`${speed(current)} now`), lines({title: 'Records finished a second', small: true, say: speed, series: [{name: 'records/s', kind: 1, fill: true, points: flow}]}), 'w4')}
		${card('Slots in use', dim(`${num(slots.busy)} of ${num(slots.total)}`), lines({title: 'Parts that run', small: true, say: num, series: [{name: 'parts running', kind: 2, fill: true, points: points.map(p => [p[0], p[3]])}]}), 'w4')}
		${frame.levels.length ? card('Parts waiting by level', html`<a class="small" href="${q(queue)}/levels">levels</a>`, frame.levels.slice(0, 12).map(([level, , waiting, running]) => html`<div class="lv"><span>${level}</span><div class="meter"><i .style=${`width:${(100 * Math.log1p(waiting)) / Math.log1p(Math.max(1, ...frame.levels.map(each => each[2])))}%`}></i></div><b>${short(waiting)}</b><span class="dim">${running ? `${num(running)} run` : ''}</span></div>`), 'w4') : ''}
	</div>
	${frame.handlers_ran?.length ? card('How long parts run, by handler', dim('since the workers started'), html`<table class="cards">${heads('Handler', '#Done', '#Failed', '#Retried', 'From under 1 ms to over 30 min', '#Half within', '#95 % within')}<tbody>${frame.handlers_ran.map(h => html`<tr><td class="wide"><b>${h.name}</b></td>${n('done', num(h.done))}${n('failed', num(h.failed))}${n('retried', num(h.retried))}<td class="wide">${spark(h.classes, 'ok')}</td>${n('half within', span(h.p50_s * 1e3))}${n('95 % within', span(h.p95_s * 1e3))}</tr>`)}</tbody></table>`, 'flat') : ''}`;
}
function empty(queue) {
	return html`<h1>${queue}</h1><section class="card empty"><h2>This queue is empty, and no worker waits at it</h2><p>These commands fill it:</p>
<pre>streamq worker MODULE:APP --queue ${queue}
streamq load big.csv --handler NAME --queue ${queue}
streamq run big.csv --map MODULE:FUNCTION -o out.jsonl  # or all in one</pre><p><a href="${q(queue)}/requests?state=ended">requests that have ended</a></p></section>`;
}

// Requests

function table(rows, {brief = false} = {}) {
	if (!rows.length) return html`<div class="empty">No request fits.</div>`;
	const chosen = app.selected ||= new Set();
	const select = !brief && mayChange();
	return html`<table class="cards">${heads(...(select ? ['✓'] : []), 'Request', 'State', '#Level', 'Progress', '#Running', '#Failed', '#Speed', '#Left', 'Why not faster')}
	<tbody>${rows.map(row => html`<tr class=${chosen.has(row.id) && select ? 'sel' : ''} data-id=${row.id}>
		${select ? html`<td class="pick"><input type="checkbox" aria-label="choose ${row.id}" .checked=${chosen.has(row.id)} @change=${event => { event.target.checked ? chosen.add(row.id) : chosen.delete(row.id); redraw(); }}></td>` : ''}
		<td class="wide"><a class="id" href=${r(row.id)}>${row.id}</a> ${dim(row.handler)}${labels(row.labels)}</td>
		<td data-k="state">${chip(row)}</td>${n('level', row.level)}
		<td class="wide">${progress(row.parts)}<span class="small nowrap">${(row.state === 'loading' ? short : percent)(row.records.done + row.records.failed, row.records.total)} ${dim(`of ${short(row.records.total)}`, '')}</span></td>
		<td class="num" data-k="running">${num(row.parts.running)} ${dim(`/ ${num(row.limit)}`, '')}</td>${n('failed', num(row.records.failed))}${n('speed', speed(row.speed))}${n('left', isLive(row) ? eta(row) : row.finished_ms ? html`<span title=${clock(row.finished_ms, true)}>ended ${ago(row.finished_ms)}</span>` : '–')}<td class="wide small" data-k="why">${row.why?.says || ''}</td></tr>`)}</tbody></table>`;
}
function labels(found) {
	return Object.entries(found || {}).map(([name, value]) => html` <span class="chip label" title="${name}=${value}">${name}=${value}</span>`);
}
const filterQuery = () => {
	const query = new URLSearchParams();
	for (const name of ['state', 'handler', 'prefix', 'level', 'sort', 'page']) if (param(name)) query.set(name, param(name));
	query.sort();
	return query.toString();
};
export const requestsTopics = queue => [`t:${queue}?${filterQuery()}`];
export function requests(queue) {
	const [frame, not] = shown(requestsTopics(queue)[0]);
	const change = (name, value) => go(withQuery({[name]: value, page: null}), {replace: true});
	const pick = (label, name, values, usual, word) => html`<label>${label}<select @change=${event => change(name, event.target.value)}>${values.map(each => html`<option value=${each} .selected=${param(name, usual) === each}>${each === usual && word ? word : each}</option>`)}</select></label>`;
	return html`<div class="head"><h1>Requests</h1>${frame ? dim(html`${num(frame.count)} ${unreadNote(frame)}`, '') : ''}<span class="grow"></span>
		<div class="row">${pick('State', 'state', ['live', 'open', 'loading', 'paused', 'ended', 'done', 'failed', 'cancelled'], 'live', 'not finished')}${pick('Handler', 'handler', [...new Set(['', ...(frame?.handlers || []), param('handler')])], '', 'any')}
		<label>Id begins with<input id="search" class="short" .value=${param('prefix')} @input=${event => change('prefix', event.target.value)}></label>${pick('Order', 'sort', ['newest', 'oldest', 'level', 'running', 'waiting', 'failed'], 'newest')}</div></div>
	${not || html`${bulk()}<section class="card flat">${table(frame.rows)}
		${frame.pages > 1 ? html`<footer class="row"><a class="button small" aria-disabled=${frame.page <= 1} href=${withQuery({page: frame.page > 2 ? frame.page - 1 : null})}>previous</a>${dim(`page ${num(frame.page)} of ${num(frame.pages)}`)}<a class="button small" href=${withQuery({page: Math.min(frame.pages, frame.page + 1)})}>next</a></footer>` : ''}</section>`}`;
}
function bulk() {
	const chosen = [...new Set([...(app.selected || [])].map(id => id.split('/')[0]))];
	if (!chosen.length || !mayChange()) return nothing;
	// What is done leaves the choice at once; what is refused stays in it.
	const each = (verb, said) => act(async () => {
		let done = 0;
		app.selected.clear(); redraw();
		for (const id of chosen.slice(0, 1000)) {
			try { await call('POST', `${pathOf(id)}/${verb}`); } catch (error) { for (const left of chosen.slice(done)) app.selected.add(left); throw error; }
			done++;
		}
		return done;
	}, n => `${plural(n, 'request')}: ${said}`);
	const destroy = async (verb, said, title) => { if (await ask({title, says: chosen.slice(0, 12).join(', ') + (chosen.length > 12 ? ' …' : ''), yes: title.replace('?', ''), danger: verb === 'cancel', typed_: chosen.length > 20 ? String(chosen.length) : ''})) each(verb, said); };
	return html`<div class="card row actions"><b>${plural(chosen.length, 'request')} chosen</b>${btn('pause', () => each('pause', 'paused'))}${btn('resume', () => each('resume', 'go on'))}${btn('retry failed…', () => destroy('retry', 'failed parts run again', `Run failed parts of ${plural(chosen.length, 'request')} again?`))}${btn('cancel…', () => destroy('cancel', 'cancelled', `Cancel ${plural(chosen.length, 'request')}?`), 'small danger')}${btn('none', () => { app.selected.clear(); redraw(); })}</div>`;
}

// One request

export function requestTopics(id, tab) {
	const frame = app.frames[`r:${id}`];
	const queue = app.me?.only ? '' : frame?.status?.queue;
	return [`r:${id}`, ...({'': [`m:${id}`], failures: [`f:${id}`, `m:${id}`], running: queue ? [`w:${queue}`] : []}[tab] || []), ...(queue ? [`l:${queue}`] : [])];
}
const changesOf = status => (app.frames[`l:${status.queue}`]?.changes || []).filter(each => each.request.split('/')[0] === status.id);
export function request(id, tab) {
	const [frame, not] = shown(`r:${id}`);
	if (not) return not;
	const {status} = frame, {parts, records} = status, points = app.points[`r:${id}`] || [];
	const finished = records.done + records.failed, all = Math.max(records.total, frame.foreseen || 0), live = isLive(status), changes = changesOf(status);
	const sofar = status.state === 'loading' && all === records.total;
	const to = (name, text, count) => html`<a href="${r(id)}${name && `/${name}`}" aria-current=${tab === name ? 'page' : nothing}>${text} ${count == null ? nothing : num(count)}</a>`;
	return html`<div class="head"><div><h1>${status.id}</h1><div class="row small"><span>${chip(status)}</span><span class="dim">${status.flow ? 'flow' : 'handler'} <b>${status.flow || status.handler.replace(`-${status.id}`, '')}</b></span>${report || app.me.only ? dim(status.queue, '') : html`<a href=${q(status.queue)}>${status.queue}</a>`}${dim(`made ${ago(status.created_ms)}`, '')}${labels(status.labels)}</div></div><span class="grow"></span>${buttons(status)}</div>
	<section class="card stack">
		<div class="row"><div class="tile"><span class="v">${sofar ? short(finished) : percent(finished, all)}</span></div><div class="grow"><div>${num(finished)} of ${all > records.total ? `≈ ${short(all)}` : num(all)} records${sofar ? ' so far, more are being loaded' : ''}</div><div class="dim small">${all > records.total ? `${status.stages ? 'of all stages; ' : ''}${num(records.total)} are there by now` : plural(parts.total, 'part')}${status.retried ? ` · ${plural(status.retried, 'retry run')}` : ''}</div></div><div class="right"><div><b>${speed(frame.speed)}</b></div><div class="dim small">${live ? 'lately' : 'on the whole'}</div></div></div>
		${progress({...parts, total: (parts.total * all) / (records.total || 1)}, true)}<p class="visually-hidden" role="status">${percent(finished, all)} finished</p>
		<div class="legend">${key('p-done', 'done', parts.done)}${key('p-run', 'running', parts.running)}${key('p-retry', 'in retry', parts.retry)}${key('p-fail', 'failed', parts.failed)}${key('k-wait', 'waiting', parts.waiting)}${records.failed > parts.failed ? html`<span>records failed <b>${num(records.failed)}</b></span>` : ''}</div>
	</section>
	${status.waits_for_release ? html`<div class="card notice"><span class="mark" aria-hidden="true">▲</span><span>Its canary of ${plural(status.canary, 'part')} has ended: ${num(parts.failed)} failed. The others wait for the release.</span>${mayChange() ? btn('Release', () => actions.release(id), 'primary') : ''}</div>` : ''}
	${report ? nothing : html`<nav class="tabs" aria-label="details">${to('', 'Summary')}${to('failures', 'Failures', parts.failed)}${app.me.only ? nothing : html`${to('running', 'Running', parts.running)}${to('log', 'Log', changes.length)}`}</nav>`}
	${tab === 'failures' ? [flat(failures(id, status)), map(id, status)] : tab === 'running' ? flat(running(id, status)) : tab === 'log' ? flat(logTable(changes)) : html`
	<div class="grid even">
		<section class="card stack ${mayChange() && live ? 'w7' : ''}"><header><h2>${live ? 'When it ends, and why not sooner' : 'How it ended'}</h2></header>${live ? ending(frame) : html`<p>${status.state[0].toUpperCase() + status.state.slice(1)} ${status.finished_ms ? html`at ${clock(status.finished_ms, true)}, after ${span(status.finished_ms - (status.started_ms || status.created_ms))}` : ''}: ${plural(records.done, 'record')} done, ${num(records.failed)} failed${status.reason === 'deadline' ? ', when its deadline came' : ''}.</p>`}</section>
		${mayChange() && live ? html`<section class="card stack w5 actions"><header><h2>Steer</h2><span class="dim small" id="edit-hint">${status.stages ? 'all stages at once; ' : ''}Enter applies, ↑↓ change by one</span></header><div class="row">${actions.edit({id, name: 'limit', value: status.limit, least: 1, most: 1e6})}${actions.edit({id, name: 'level', value: status.level, least: 0, most: 99})}${actions.edit({id, name: 'rate', value: rateText(status.rate_limit)})}</div>${command(`streamq set ${id} --limit ${status.limit}`)}</section>` : ''}
	</div>
	${stages(status)}
	${map(id, status)}
	${points.length > 2 || live ? charts(frame, points, changes) : ''}
	${card('Policy', nothing, policy(frame), 'flat')}
	${report?.failures ? card('Failures', nothing, failures(id, status), 'flat') : ''}`}`;
}
const rateText = rate => (rate == null ? 'off' : rate >= 1 ? `${+rate.toFixed(4)}/s` : `${+(rate * 3600).toFixed(4)}/h`);
export const logTable = (changes, all) => (changes.length ? html`<table class="cards">${heads('When', 'Who', 'What', ...(all ? ['Request'] : []))}<tbody>${changes.map(each => html`<tr><td class="nowrap" data-k="when"><span title=${ago(each.t)}>${clock(each.t, true)}</span></td><td data-k="who">${each.who}</td><td class="wide" data-k="what">${each.what}</td>${all ? html`<td data-k="request"><a href=${r(each.request)}>${each.request}</a></td>` : ''}</tr>`)}</tbody></table>` : html`<div class="empty">Nobody has changed anything.</div>`);
function buttons(status) {
	if (!mayChange()) return nothing;
	const live = isLive(status);
	return html`<div class="row actions">${live ? (status.paused ? btn('Resume', () => actions.resume(status.id), 'primary') : btn('Pause', () => actions.pause(status.id), '')) : ''}
		${status.parts.failed ? btn('Retry failed…', () => actions.retry(status), '', status.state === 'cancelled') : ''}
		${live ? btn('Cancel…', () => actions.cancel(status), 'danger') : btn('Remove…', () => actions.purge(status), 'danger')}
		${app.me.session ? btn('Share…', () => actions.share(status.id), '') : ''}<a class="button" href="${pathOf(status.id)}/report.html" download="${status.id}.html">Report</a></div>`;
}
function ending(frame) {
	const {ending: end, why, status, slots} = frame;
	const free = slots.able - slots.busy, at = t => clock(t, t - here() < 3600000);
	return html`<p>${status.paused ? 'It goes on when it is resumed.' : status.waits_for_release ? 'It goes on when it is released.' : !end && status.state === 'loading' ? 'When it ends can be told once it is loaded completely.' : !end ? 'Nothing moves, so there is no end in sight.' : html`Ends about <b>${at(end.likely)}</b>, in ${span(end.likely - here())}${!end.low ? dim(' (too early for a range)') : at(end.low) === at(end.high) ? nothing : html`; ${end.high ? `between ${at(end.low)} and ${at(end.high)}` : `not before ${at(end.low)}`} ${dim('(by its fastest and slowest tenth lately)')}`}`}</p>${why ? html`<p><b>Why not faster:</b> ${why.says}${why.code === 'limit' && free > 0 ? `; ${plural(free, 'slot')} that could run it ${free === 1 ? 'is' : 'are'} free` : ''}</p>` : ''}`;
}
function charts(frame, points, changes) {
	const marks = changes.map(each => [each.t, `${each.what}, ${each.who}`]);
	const end = frame.ending, last = points.at(-1), live = isLive(frame.status);
	const band = live && end?.low && last ? [[last[0], last[1] + last[2], last[1] + last[2]], [end.low, interpolate(last, end.high || end.likely * 2 - end.low, end.low), last[4]], [end.high || end.likely, last[4], last[4]]] : null;
	return html`<div class="grid even">${card('Progress', html`<span class="legend">${key('p-done', 'finished')}<span>┄ ${frame.foreseen > frame.status.records.total ? 'expected' : 'loaded'}</span>${band ? html`<span>shaded: when it may end</span>` : ''}</span>`, lines({title: 'Progress in records', say: num, band, marks, until: band ? Math.min(end.high || end.likely, here() + 20 * (last[0] - points[0][0])) : 0, series: [{name: 'finished', kind: 1, fill: true, points: points.map(p => [p[0], p[1] + p[2]])}, {name: 'loaded', kind: 4, points: points.map(p => [p[0], p[4]])}]}), 'w6')}${card('Records a second', dim(live ? `${speed(frame.speed)} now` : 'on the whole'), lines({title: 'Records a second', say: speed, marks, series: [{name: 'records/s', kind: 2, fill: true, points: speeds(points)}]}), 'w6')}</div>`;
}
const interpolate = (last, slow, at) => last[1] + last[2] + ((last[4] - last[1] - last[2]) * (at - last[0])) / Math.max(1, slow - last[0]);
function stages(status) {
	if (!status.stages?.length) return nothing;
	const held = stage => stage.held_by && html`<span class="chip warn">${stage.held_by}</span>`;
	return card(`Stages${status.flow ? ` of ${status.flow}` : ''}`, status.groups?.open ? dim(`${plural(status.groups.open, 'group')} of children open${status.groups.blocked ? `, ${num(status.groups.blocked)} with failed children` : ''}`) : nothing, html`<ol class="stages">${status.stages.map((stage, i) => html`${i ? html`<li class="arrow" aria-hidden="true"><span>${stage.kind === 'join' ? '⇉' : stage.kind === 'reduce' ? '⇶' : '→'}</span></li>` : ''}<li class="stage"><div class="row"><b>${stage.name}</b><span class="chip label">${stage.kind}</span>${held(stage)}</div><div class="small dim">${num(stage.parts.done)} of ${num(stage.parts.total)} · ${num(stage.parts.running)} / ${num(stage.limit)} running${stage.parts.waiting ? ` · ${short(stage.parts.waiting)} wait` : ''}</div>${progress(stage.parts)}<div class="small">${stage.parts.failed ? html`<b class="bad">${num(stage.parts.failed)} failed</b> · ` : ''}${dim(`${speed(stage.rate)}, level ${stage.level}`, '')}</div></li>`)}</ol>`);
}
function map(id, status) {
	const data = app.frames[`m:${id}`];
	if (!data || data.problem || !data.total) return nothing;
	const sampled = data.in_hand > data.seen_in_hand || data.failed > data.seen_failed;
	const range = app.range?.id === id ? app.range : null;
	return html`<section class="card"><header><h2>Map of the input</h2><span class="legend">${key('p-done', 'done')}${key('p-run', 'running')}${key('p-retry', 'retry')}${key('p-fail', '✕ failed')}${key('k-wait', 'waiting')}</span></header>
	<sq-map .data=${data} @open=${event => openRange(id, event.detail)}></sq-map>
	${sampled ? html`<p class="dim small">≈ a sample: ${num(data.seen_failed)} of ${num(data.failed)} failed parts and ${num(data.seen_in_hand)} of ${num(data.in_hand)} parts in hand are drawn</p>` : ''}
	${range ? html`<div class="group"><div class="n">${num(range.to - range.from + 1)}<div class="dim small">parts</div></div><div class="what"><b>Parts ${num(range.from)} – ${num(range.to)}</b> ${range.failures == null ? 'reading …' : range.failures.length ? dim(plural(range.failures.length, 'failure') + (range.failures.length >= 20 ? ' or more' : '')) : dim('none failed')}</div><div class="row">${range.failures?.length && mayChange() ? btn('retry this range…', () => actions.retry(status, {first: range.from, last: range.to}, `the failed parts from ${num(range.from)} to ${num(range.to)}`, 0)) : ''}${btn('close', () => { app.range = null; redraw(); })}</div><div class="more">${(range.failures || []).slice(0, 20).map(each => sample(id, each))}</div></div>` : ''}
	${numbers(['parts', 'running', 'in retry', 'failed'], data.marks.slice(0, 200).map(([cell, running, retry, failed]) => [`${num(cell * data.size + 1)} – ${num(Math.min(data.total, (cell + 1) * data.size))}`, num(running), num(retry), num(failed)]))}</section>`;
}
async function openRange(id, {from, to}) {
	if (report) return;
	app.range = {id, from, to, failures: null};
	redraw();
	const failures = await act(() => call('GET', `${pathOf(id)}/failures?from=${from}&to=${to}&most=20`));
	if (app.range?.from === from) { app.range.failures = failures || []; redraw(); }
}
function sample(id, each) {
	const key = `${id} ${each.part}`, shown = app.payloads?.[key];
	return html`<div class="sample small"><div><b>part ${num(each.part)}${each.record ? `, record ${num(each.record)}` : ''}</b>${each.source ? html` · <span class="mono">${each.source}:${num(each.line)}</span>` : ''}${each.attempts ? ` · ${plural(each.attempts, 'attempt')}` : ''} ${mayChange() ? btn('payload', () => payload(id, each.part), 'link') : ''}</div><div class="mono">${each.error}${each.message ? `: ${each.message}` : ''}</div>${each.traceback ? html`<details><summary>traceback</summary><pre class="box" tabindex="0">${each.traceback}</pre></details>` : ''}${shown ? html`<pre class="box" tabindex="0">${shown.bytes < 0 ? 'the server has it no more' : shown.text}</pre>${shown.bytes > 4096 ? dim(`the first 4 KiB of ${bytes(shown.bytes)}`) : ''}` : ''}</div>`;
}
async function payload(id, part) {
	const found = await act(() => call('GET', `${pathOf(id)}/payload?part=${part}`));
	if (found) { (app.payloads ||= {})[`${id} ${part}`] = found; redraw(); }
}
function failures(id, status) {
	const [frame, not] = shown(`f:${id}`);
	if (not) return not;
	if (!frame.groups.length) return html`<div class="empty">No part has failed.</div>`;
	const exact = frame.sample >= frame.parts;
	const open = (app.open ||= new Set());
	return html`<footer class="row"><span class="dim small">${exact ? `all ${plural(frame.parts, 'failed part')}` : `≈ from a sample of ${num(frame.sample)} of ${num(frame.parts)} failed parts`}, grouped by error and message pattern</span><span class="grow"></span>${report ? nothing : html`<a class="button small" href="${pathOf(id)}/errors?most=1000" download="${id}-errors.json">download</a>`}${mayChange() && status.state !== 'cancelled' ? btn(`retry all ${num(frame.parts)}…`, () => actions.retry(status)) : ''}</footer>
	${frame.groups.map(group => { const key = `${id} ${group.error} ${group.pattern}`, isOpen = open.has(key) || report; return html`<div class="group"><div class="n">${exact ? '' : '≈ '}${num(group.about)}</div><div class="what"><b>${group.error}</b>${group.stage ? html` <span class="chip label">${status.stages?.[group.stage - 1]?.name || group.stage}</span>` : ''}${group.pattern ? html`: <span class="mono">${group.pattern}</span>` : ''}<div class="dim small">parts ${num(group.first_part)} – ${num(group.last_part)}${group.source && group.source_count > 1 ? html` · ${percent(group.source_count, group.count)} in <span class="mono">${group.source}</span>` : ''}</div></div>${spark(group.where)}<div class="row">${report ? nothing : html`<button class="small" aria-expanded=${isOpen} @click=${() => { isOpen ? open.delete(key) : open.add(key); redraw(); }}>${plural(group.samples.length, 'sample')}</button>`}${mayChange() && status.state !== 'cancelled' ? btn('retry group…', () => actions.retry(status, {error: group.error, pattern: group.pattern, stage: group.stage}, `about ${plural(group.about, 'failed part')} of this group`, group.about)) : ''}</div>${isOpen ? html`<div class="more">${group.samples.map(each => sample(id, each))}</div>` : ''}</div>`; })}`;
}
function running(id, status) {
	const [frame, not] = shown(`w:${status.queue}`);
	if (not) return not;
	const found = frame.workers.flatMap(worker => worker.running.filter(each => each.request.split('/')[0] === id).map(each => ({...each, worker: worker.name}))).sort((a, b) => a.since_ms - b.since_ms).slice(0, 100);
	if (!found.length) return html`<div class="empty">No worker has said with its last heartbeat that it runs a part of this request for longer than a moment.</div>`;
	return html`<div class="scroll" tabindex="0" role="region" aria-label="parts that run"><table class="cards">${heads('Worker', '#Process', '#Part', '#For', '#Progress')}<tbody>${found.map(each => html`<tr><td class="wide"><b>${each.worker}</b></td>${n('process', each.pid)}${n('part', num(each.part))}${n('for', span(here() - each.since_ms))}${n('progress', each.progress ? `${each.progress} %` : '–')}</tr>`)}</tbody></table></div>`;
}
const when = ms => (ms ? clock(ms, true) : 'not yet');
function policy({status, spec}) {
	const facts = [['queue', status.queue], ['handler', status.handler], ['level', status.level], ['limit', `${num(status.limit)} parts at once`], ['rate', rateText(status.rate_limit)], ['retries', spec.retries == null ? 'the handler decides' : spec.retries], ['backoff', span(spec.backoff_ms ?? 1000)], ['time limit of a part', spec.timeout_ms ? span(spec.timeout_ms) : 'the handler decides'], ['ends as failed after', status.max_failures != null ? plural(status.max_failures, 'failure') : status.max_percent != null ? `${status.max_percent} % failures` : 'never'], ['kept after its end', span(status.keep_ms)], ['made', when(status.created_ms)], ['started', when(status.started_ms)], ['ended', when(status.finished_ms)], ['results on the server', num(status.results)], ...(spec.files?.length ? [['files', spec.files.slice(0, 20).join(', ')]] : []), ...Object.entries(status.labels || {}).map(([name, value]) => [`label ${name}`, value])];
	return html`<footer><dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></footer>`;
}
