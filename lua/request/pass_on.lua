-- pass_on: hand a batch of a stage over to the next stage, count it, and hand out the next batch.
--
--   running -> done               parts of this stage
--   (absent) -> waiting           parts of the next stage, of its join, or the reduce
--   waiting, retry -> running     parts handed out
--   open -> done, failed          request, with the last part of all stages
--
-- KEYS[1]  meta      HASH    state, limit, counts, rate, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
-- KEYS[6]  holders   HASH    call number and running part of each lease
-- KEYS[7]  tries     HASH    part number, what went wrong with it
-- KEYS[8]  partial   HASH    part number, outcomes so far
-- KEYS[9]  failed    HASH    part number, what was given up
-- KEYS[10] events    channel the end is published there
-- KEYS[11+] flow     of the other stages, as lib/flow.lua reads them
--
-- ARGV[1]  terms     holder, call, most, max_bytes, lease_ms, created, records (as of finish); and
--                    records of all children
-- ARGV[2]  facts     what this stage is, as its meta has it
-- ARGV[3]  numbers   of the parts (I8)
-- ARGV[4]  origins   of the parts, joined by spaces
-- ARGV[5]  counts    of the children of each part (I4)
-- ARGV[6]  sizes     of the children's payloads (I4)
-- ARGV[7]  labels    about or origin of each child, joined by newlines
-- ARGV[8]  payloads  of the children, joined
--
-- Returns  as finish does: ok, over, lost, late or a state, ...; before the parts: tokens for
--          other stages, as place, queue, tokens, list, look, ...
-- Errors   UNKNOWN   no such request, or a stage of it was purged
--          NEWER     a later version of streamq made the request
--          FLOW      the caller knows another shape of the flow
-- Cost     O(parts + children + parts handed out)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries
-- @include hand
-- @include next_batch
-- @include ending
-- @include marks
-- @include window
-- @include flow
-- @include tree
-- @include handover

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], failed = KEYS[9], events = KEYS[10],
  flow = { unpack(KEYS, 11) },
}
local terms, facts, numbers, origins = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local counts, sizes, labels, payloads = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local holder, call, most, max_bytes, lease_ms, created, records, handed =
  string.match(terms, "^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$")
call, most, max_bytes, lease_ms = tonumber(call), tonumber(most), tonumber(max_bytes), tonumber(lease_ms)
created, records, handed = tonumber(created), tonumber(records), tonumber(handed)

local given, children = #counts / 4, #sizes / 4
numbers = { struct.unpack("<" .. string.rep("I8", given), numbers) }
-- The last value of struct.unpack is the position where it stopped.
numbers[given + 1] = nil

-- Lua's stack has room for 8,000 values.
local UNPACKED_AT_ONCE = 4000

-- Returns so many numbers (I4) that a text consists of. An error in here must come before the first
-- write, since nothing is taken back.
local function numbers_in(text, count)
  local found = { struct.unpack("<" .. string.rep("I4", math.min(count, UNPACKED_AT_ONCE)), text) }
  for first = UNPACKED_AT_ONCE + 1, count, UNPACKED_AT_ONCE do
    local some = math.min(count - first + 1, UNPACKED_AT_ONCE)
    local more = { struct.unpack("<" .. string.rep("I4", some), text, 4 * first - 3) }
    for i = 1, some do
      found[first + i - 1] = more[i]
    end
  end
  return found
end

counts, sizes = numbers_in(counts, given), numbers_in(sizes, children)

load_failed_too()
local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
if r.state == "done" or r.state == "cancelled" then
  return { r.state, 0, list_of(r), 0, 0, {}, {} }
end
local now = now_ms()
local f = read_facts(k, r, now, facts)
if not f or r.protocol < FLOW then
  return redis.error_reply("FLOW " .. (redis.call("HGET", k.meta, "shape") or ""))
end
f.end_all = end_all
r.flow = f
if f.own < f.stages and not stage_at(f, f.own + 1) then
  return unknown()
end
local before = r.total - r.done - r.failed
local counted, counted_records = 0, 0

-- Returns the words of a text.
local function split(text, pattern, count)
  if count == 1 then
    return { text }
  end
  local words, n = {}, 0
  for word in string.gmatch(text, pattern) do
    n = n + 1
    words[n] = word
  end
  return words
end

-- Returns the payloads that a text consists of.
local function cut(text, lengths, count)
  local pieces, at = {}, 1
  for i = 1, count do
    pieces[i] = string.sub(text, at, at + lengths[i] - 1)
    at = at + lengths[i]
  end
  return pieces
end

-- Returns by part what a redrive of it is called, for those that had trouble; and clears the
-- entries of these.
local function settle_troubles(acked)
  local runs = {}
  for i, text in ipairs(redis.call("HMGET", k.tries, unpack(acked))) do
    local run = read_tries(text).run
    if run > 0 then
      runs[acked[i]] = run
    end
  end
  redis.call("HDEL", k.tries, unpack(acked))
  forget_outcomes(k.partial, acked)
  redis.call("ZREM", k.retry, unpack(acked))
  return runs
end

-- Returns what a child says of itself when a redrive of its parent yields it: `17.1` for `17`.
local function renamed(label, origin, called)
  if called == origin then
    return label
  end
  local at = string.find(label, "@", 1, true) or 0
  return string.sub(label, 1, at) .. called .. string.sub(label, at + 1 + #origin)
end

-- Hands over the children of a part, from the first to the last: of a spread many, of others one or
-- none.
local function hand_over_part(origin, run, first, last, names, given_payloads)
  local called = origin
  if run and not f.grouped then
    called = of_run(origin, run)
  end
  if f.kind == "join" or f.kind == "reduce" then
    empty_inbox(f, origin)
  end
  if f.kind == "reduce" and run_of(origin) then
    for i = first, last do
      arrive(f, tree_of(f), given_payloads[i])
    end
    return
  end
  if f.kind == "spread" then
    local kept = ""
    if f.join then
      kept, first = given_payloads[first], first + 1
    end
    spread_out(f, called, last - first + 1, kept)
  elseif last < first then
    drop_out(f, called, NOTHING)
  end
  for i = first, last do
    hand_over(f, renamed(names[i], origin, called), given_payloads[i])
  end
end

-- Records parts that XACK has just acknowledged: `passes` tells which, or is nil for all.
local function record(passes)
  local names, own = split(labels, "[^\n]+", children), split(origins, "%S+", given)
  local acked, chosen, first = numbers, nil, 1
  if passes then
    acked, chosen = {}, {}
    for i = 1, given do
      if passes(numbers[i], own[i]) then
        acked[#acked + 1] = numbers[i]
        chosen[i] = true
      end
    end
  end
  if #acked == 0 then
    return
  end
  r.smooth = redis.call("EXISTS", k.tries, k.partial, k.retry) == 0 or nil
  local runs = r.smooth and {} or settle_troubles(acked)
  if r.smooth and not passes and children == given and f.kind == "map" and f.feeds == "parts"
    and not f.items and not f.trace then
    -- One for each, as in most batches.
    add_parts(f, f.next, names, sizes, payloads, handed)
  else
    local given_payloads = cut(payloads, sizes, children)
    for i = 1, given do
      if not chosen or chosen[i] then
        hand_over_part(own[i], runs[numbers[i]], first, first + counts[i] - 1, names, given_payloads)
      end
      first = first + counts[i]
    end
  end
  redis.call("XDEL", k.parts, unpack(acked))
  counted = #acked
  put(r, "done", r.done + counted)
  put(r, "records_done", r.records_done + (passes and counted_records or records))
end

-- Returns the entry of a part, if it is of the item that the caller ran (rule F6).
local function own_entry(number, origin)
  if f.kind == "reduce" and run_of(origin) then
    -- After a failover other results may have these arrivals: the part runs again.
    return nil
  end
  local entry = redis.call("XRANGE", k.parts, number, number)[1]
  local is_own = entry and string.format("%s", origin_of(entry[2][1], number)) == origin
  return is_own and entry or nil
end

-- Counts the records of a part that is recorded by itself.
local function count_records(number, entry)
  local own = read_tries(redis.call("HGET", k.tries, number)).records
  counted_records = counted_records + (own > 0 and own or tonumber(string.match(entry[2][1], "^%d+")) or 0)
end

-- Returns whether nobody has taken a part since its lease was lost, so that its result counts. After
-- a redrive it may be of the run before, whose good records have been handed over already.
local function is_free(number)
  return redis.call("ZSCORE", k.retry, number)
    and not has_delivered(k.parts, number, read_tries(redis.call("HGET", k.tries, number)))
end

-- Checks each part by itself: without the lease, or where the slot has forgotten calls of it.
local function record_one_by_one(is_held)
  record(function(number, origin)
    local entry = own_entry(number, origin)
    if not entry or not (is_held or is_free(number)) then
      return false
    end
    if redis.call("XACK", k.parts, "w", number) == 0 then
      return false
    end
    count_records(number, entry)
    return true
  end)
end

-- With the lease, records the whole batch at once: XACK counts all parts, or 0 for a repeated call.
local function record_batch()
  local acked = redis.call("XACK", k.parts, "w", unpack(numbers))
  if acked == given then
    record()
  elseif acked > 0 then
    record(function(number, origin)
      local entry = number <= r.delivered and redis.call("HEXISTS", k.failed, number) == 0
        and own_entry(number, origin)
      if entry then
        count_records(number, entry)
      end
      return entry and true or false
    end)
  end
end

local lease = redis.call("ZSCORE", k.leases, holder)
local stored = lease and (tonumber(redis.call("HGET", k.holders, holder)) or 0)
if given > 0 and lease then
  -- The slot may have given these numbers to other items, and forgotten it. A repeat of a call may be
  -- of one that was looked at for that.
  if call <= stored or is_gap(holder, call, stored) then
    record_one_by_one(true)
  else
    record_batch()
  end
elseif given > 0 and created == r.created_ms then
  record_one_by_one(false)
end
if counted > 0 and count_flow(f, counted) then
  local others = leave_flow(f, before)
  return { r.state, 0, list_of(r), is_owed(r) and now or 0, counted, {}, others }
end
note_room_behind(f)

local word, basket, troubles = next_batch(k, r, now, holder, call, stored, {
  most = most, max_bytes = max_bytes, lease_ms = lease_ms,
})
if not is_live(r) then
  word = r.state
end
local mint, look = invite(k, r, now)
local others = leave_flow(f, before)
save(k.meta, r)
if not basket then
  return { word, mint, list_of(r), look, counted, {}, others }
end
return { word, mint, list_of(r), look, counted, troubles, others, contents(basket) }
