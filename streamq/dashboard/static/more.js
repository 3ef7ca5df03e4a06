// Levels, workers, timeline, health and the log.
import {html, nothing, app, num, short, span, ago, plural, percent, chip, progress, shown, mayChange, go, here, speed, heads, n, dim, card, flat} from './core.js';
import {numbers, hue} from './charts.js';
import * as actions from './actions.js';
import {r, q, logTable} from './pages.js';

const title = (name, note) => html`<div class="head"><h1>${name}</h1>${dim(note, '')}</div>`;
export function levels(queue) {
	const [frame, not] = shown(`v:${queue}`);
	if (not) return not;
	const from = id => frame.levels.flatMap(each => each.cards).find(each => each.id === id)?.level;
	const drop = (event, level) => { event.preventDefault(); event.currentTarget.classList.remove('over'); const id = event.dataTransfer.getData('text/plain'); if (id) actions.set(id, {level}, {level: from(id)}); };
	const key = (event, card) => { const step = {'[': -1, ']': 1}[event.key]; if (step && mayChange()) actions.set(card.id, {level: Math.max(0, Math.min(99, card.level + step))}, {level: card.level}); };
	return html`${title('Levels', frame.serving == null ? 'nothing runs now' : html`slots serve level <b>${frame.serving}</b> first; lower numbers go before higher ones`)}
	${frame.levels.length ? html`<div class="columns" tabindex="0" role="region" aria-label="levels">${frame.levels.map(each => html`<section class="column" data-level=${each.level} @dragover=${event => { event.preventDefault(); event.currentTarget.classList.add('over'); }} @dragleave=${event => event.currentTarget.classList.remove('over')} @drop=${event => drop(event, each.level)}><h2><span>Level ${each.level}</span>${dim(plural(each.requests, 'request'))}</h2><div class="small dim">${short(each.waiting)} parts wait · ${num(each.running)} run</div>
		${each.cards.map(card => html`<div class="pcard" draggable=${mayChange()} tabindex=${mayChange() ? 0 : nothing} role="group" aria-label="${card.id}, level ${card.level}; brackets change the level" @dragstart=${event => event.dataTransfer.setData('text/plain', card.id)} @keydown=${event => key(event, card)}><div class="row"><a href=${r(card.id)}><b>${card.id}</b></a>${chip(card)}</div>${progress(card.parts)}<div class="row small dim"><span>${short(card.parts.waiting)} wait</span><span>${num(card.parts.running)} run</span></div>${mayChange() ? html`<div class="row">${actions.edit({id: card.id, name: 'level', value: card.level, least: 0, most: 99})}</div>` : ''}</div>`)}
		${each.requests > each.cards.length ? html`<p class="small"><a href="${q(queue)}/requests?level=${each.level}">and ${num(each.requests - each.cards.length)} more</a></p>` : ''}</section>`)}</div>${mayChange() ? html`<p class="dim small" id="edit-hint">Drag a card to another level, press <kbd>[</kbd> or <kbd>]</kbd> on it, or type its level.</p>` : ''}` : html`<section class="card empty">No request waits or runs.</section>`}`;
}

export function workers(queue) {
	const [frame, not] = shown(`w:${queue}`);
	if (not) return not;
	if (!frame.workers.length) return html`<h1>Workers</h1><section class="card empty"><h2>No worker of this queue is alive</h2><pre>streamq worker MODULE:APP --queue ${queue}</pre></section>`;
	const mixed = frame.versions.length > 1, newest = frame.versions.at(-1);
	const many = frame.strip.length > 12, slots = frame.strip.reduce((sum, each) => sum + each[2], 0), busy = frame.strip.reduce((sum, each) => sum + each[1], 0);
	return html`${title('Workers', `${plural(frame.count, 'worker')}, ${num(busy)} of ${plural(slots, 'slot')} busy`)}
	${many ? card('How busy each is', nothing, html`<div class="strip" role="img" aria-label="${num(busy)} of ${num(slots)} slots busy">${frame.strip.slice(0, 2000).map(([name, b, s]) => html`<i title="${name}: ${b} of ${s} busy"><b .style=${`height:${s ? (100 * b) / s : 0}%`}></b></i>`)}</div>`) : ''}
	<section class="card flat"><table class="cards">${heads('Worker', '#Busy', 'Handlers', '#Parts', '#Failed', '#Speed', 'Version', '#Up', '#Heard', 'Longest running')}<tbody>
	${frame.workers.map(each => { const late = here() - each.beat_ms > 20000, oldest = [...each.running].sort((a, b) => a.since_ms - b.since_ms)[0]; return html`<tr><td class="wide"><b>${each.name}</b> ${each.name === `${each.host}.${each.pid}` ? nothing : dim(`${each.host} ${each.pid || ''}`)}</td><td class="num" data-k="busy">${num(each.busy)} ${dim(`/ ${num(each.slots)}`, '')}</td><td class="wide" data-k="handlers">${each.handlers.slice(0, 8).map(h => html`<span class="chip label">${h}</span> `)}${each.handlers.length > 8 ? `and ${each.handlers.length - 8} more` : ''}${each.handlers.length ? nothing : dim('none: it looks after the queue', '')}</td>${n('parts', short(each.done))}${n('failed', num(each.failed))}${n('speed', speed(each.speed))}<td data-k="version">${each.version || '–'} ${mixed && each.version !== newest ? html`<span class="chip warn">differs</span>` : ''}</td>${n('up', each.started_ms ? span(here() - each.started_ms) : '–')}<td class="num" data-k="heard">${each.beat_ms ? ago(each.beat_ms) : '–'} ${late ? html`<span class="chip warn">late</span>` : ''}</td><td class="wide small" data-k="longest running">${oldest ? html`<a href=${r(oldest.request)}>${oldest.request}</a> part ${num(oldest.part)}, ${span(here() - oldest.since_ms)}` : '–'}</td></tr>`; })}</tbody></table>${frame.count > frame.told ? html`<footer class="dim small">the first ${num(frame.told)} of ${num(frame.count)}</footer>` : ''}</section>`;
}

export function timeline(queue) {
	const [frame, not] = shown(`x:${queue}`);
	if (not) return not;
	const looks = app.looks[`x:${queue}`] || [frame], ended = [...(app.spans[`x:${queue}`]?.values() || [])];
	const seen = new Map(), note = (id, ms, parts, failed) => { const one = seen.get(id) || [0, 0, 0]; seen.set(id, [one[0] + ms, one[1] + parts, one[2] + failed]); };
	for (const [, , from, to, request, done, failed] of ended) note(request, to - from, done, failed);
	if (!ended.length) for (const look of looks) for (const [, , request] of look.slots) note(request, 1000, 0, 0);
	const total = [...seen.values()].reduce((sum, each) => sum + each[0], 0), top = [...seen.entries()].sort((a, b) => b[1][0] - a[1][0]);
	return html`${title('Timeline', `${plural(frame.slots.length, 'lease')} now${ended.length ? `, ${num(ended.length)} that ended in the last minutes` : ', looked at once a second'}${frame.left_out ? `; ≈ ${num(frame.left_out)} a second are too many to show` : ''}`)}
	<section class="card">${seen.size ? html`<div class="legend">${top.slice(0, 12).map(([id]) => html`<span><i class="key" .style=${`background:var(--${hue(id)})`}></i><a href=${r(id)}>${id}</a></span>`)}<span>▲ a part failed · △ runs again</span></div><sq-time .data=${{looks, ended}} @open=${event => go(r(event.detail))}></sq-time>${numbers(['request', 'share of slot time', 'parts done', 'failed'], top.slice(0, 100).map(([id, [ms, done, failed]]) => [id, percent(ms, total), num(done), num(failed)]))}` : html`<div class="empty">No lease was seen yet. Bars appear here while parts run.</div>`}</section>`;
}

export function health(queue) {
	const [frame, not] = shown(`h:${queue}`);
	if (not) return not;
	const bad = frame.findings.filter(each => each.verdict !== 'ok').length;
	return html`${title('Health', `${bad ? `${plural(bad, 'finding')} to look at` : 'nothing is wrong'}, as of ${ago(frame.t)}; it is looked at once a minute`)}
	<section class="card"><div class="findings">${frame.findings.map(each => html`<div class="finding"><span><span class="chip ${each.verdict}">${each.verdict}</span></span><div><b>${each.check}</b>: ${each.says}${each.remedy ? html`<div class="dim small">${each.remedy}</div>` : ''}</div></div>`)}</div></section>
	<p class="dim small">In a terminal: <code>streamq doctor</code></p>`;
}

export function log(queue) {
	const [frame, not] = shown(`l:${queue}`);
	if (not) return not;
	return html`${title('Log', `who changed what, through gateways and commands; the last ${num(frame.changes.length)}`)}${flat(logTable(frame.changes, true))}`;
}
