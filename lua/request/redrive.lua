-- redrive: run given-up parts again, under the same numbers.
--
--   failed -> retry             parts, at the front
--   done, failed -> open        request, if it had ended
--
-- KEYS[1]  meta      HASH    state, counts, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
-- KEYS[6]  tries     HASH    part number, what went wrong with it
-- KEYS[7]  failed    HASH    part number, what was given up
-- KEYS[8+] flow      of the other stages, as lib/flow.lua reads them
--
-- ARGV[1+] numbers   parts to run again
--
-- Returns  parts redriven; state; tokens to push; their list; when to look again; of a flow: how
--          many were refused, because their join or reduce is made, or because inputs are missing
-- Errors   UNKNOWN   no such request
--          ENDED     it was cancelled: its parts are gone
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(parts given)
-- Flags    none

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries
-- @include window
-- @include flow
-- @include tree

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  tries = KEYS[6], failed = KEYS[7], flow = { unpack(KEYS, 8) },
}

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
if r.state == "cancelled" then
  return redis.error_reply("ENDED the request was cancelled and its parts are gone")
end

local now = now_ms()
local f, refused_flow = begin_flow(k, r, now)
if refused_flow then
  return refused_flow
end
for number = 1, f and f.stages or 0 do
  if not stage_at(f, number) then
    return redis.error_reply("ENDED a stage of the request was purged")
  end
end

load_more(k.meta, r)
-- The results of a redrive have a number of their own, which no other redrive of the flow has.
local run = f and redis.call("HINCRBY", meta_of(f, 1), "runs", 1)

-- Returns whether nothing before a reduce is unfinished, and nothing failed that it would miss.
local function is_input_whole(on_failure)
  for number = 1, f.own - 1 do
    local s = stage_at(f, number)
    local is_child = string.find(redis.call("HGET", meta_of(f, number), "facts"), "^%a+ %a+ %d+ %d+ 1 ")
    if s.total > s.done + s.failed or (s.failed > 0 and on_failure ~= "run" and not is_child) then
      return false
    end
  end
  return true
end

-- Returns whether a part of a flow cannot run again. A part does not run again once its join or
-- reduce waits, runs or is done, since that was made without it. A join or reduce does not run again
-- while one of its inputs runs or has failed: it comes back with them (rules F10, F11).
local function is_refused(origin)
  local t = tree_of(f)
  local final = t and t.final or (f.barrier and stage_at(f, f.barrier.number).total > 0 and 1 or 0)
  local b = t and t.b or f.barrier
  if final > 0 and not (f.kind == "reduce" and not run_of(origin))
    and redis.call("HEXISTS", b.failed, final) == 0 then
    return true
  end
  local group = f.grouped and string.match(origin, "^(.*)/")
  if group then
    local found = redis.call("HMGET", f.groups, group, group .. "@")
    local is_open = found[1] and (tonumber(found[1]) > 0
      or (found[2] and redis.call("HEXISTS", f.join.failed, found[2]) == 1))
    return not is_open
  end
  local on_failure = redis.call("HGET", k.meta, "on_failure")
  if f.kind == "reduce" and run_of(origin) then
    return false
  end
  if f.kind == "reduce" then
    local waits = t and r.total - r.done - r.failed > 0
    local lacks = t and on_failure ~= "run" and failed_runs(f, t) > 0
    return waits or lacks or not is_input_whole(on_failure)
  end
  if f.kind == "join" then
    local found = redis.call("HMGET", f.groups, origin, origin .. "!")
    local is_whole = (tonumber(found[1]) or 0) == 0
      and (on_failure == "run" or (tonumber(found[2]) or 0) == 0)
    return not is_whole
  end
  return false
end

-- Returns whether a failed part may run again, and notes it in its group.
local function admit(number)
  if not f then
    return true
  end
  local entry = redis.call("XRANGE", k.parts, number, number)[1]
  local origin = entry and origin_of(entry[2][1], number)
  if not origin or is_refused(origin) then
    return false
  end
  if f.grouped then
    local group = string.match(origin, "^(.*)/")
    redis.call("HINCRBY", f.groups, group, 1)
    redis.call("HINCRBY", f.groups, group .. "!", -1)
  end
  return true
end

local redriven, refused = 0, 0
for i = 1, #ARGV do
  local number = ARGV[i]
  if redis.call("HEXISTS", k.failed, number) == 1 and not admit(number) then
    refused = refused + 1
  elseif redis.call("HDEL", k.failed, number) == 1 then
    redis.call("XCLAIM", k.parts, "w", PARKED, 0, number, "FORCE", "JUSTID")
    redis.call("ZADD", k.retry, number, number)
    local t = read_tries(redis.call("HGET", k.tries, number))
    -- A part that has killed workers must not take others along.
    t.alone = t.crashes > 0 and 1 or 0
    t.errors, t.crashes, t.run = 0, 0, run or t.run + 1
    write_tries(k.tries, number, t)
    put(r, "records_failed", r.records_failed - t.records)
    redriven = redriven + 1
  end
end
put(r, "failed", r.failed - redriven)
local left = redis.call("INCRBY", k.left, redriven)
-- A request that failed before its end goes on even if no part was redriven. No token is believed
-- out in any of its stages: those that there were may have been dropped since (rule F13).
if not is_live(r) and left > 0 then
  for number = 1, f and f.stages or 0 do
    local s = stage_at(f, number)
    put(s, "state", "open")
    put(s, "finished_ms", 0)
    put(s, "out", 0)
    put(s, "due_ms", 0)
  end
  local sealed = redis.call("HGET", f and meta_of(f, 1) or k.meta, "sealed")
  put(f and stage_at(f, 1) or r, "state", sealed and "open" or "loading")
  put(r, "finished_ms", 0)
  put(r, "out", 0)
  put(r, "due_ms", 0)
  -- Stage 1 is the request: it has the callbacks, and the deadline.
  local request = f and meta_of(f, 1) or k.meta
  redis.call("HINCRBY", request, "redrives", 1)
  -- A caller that runs it again after its deadline means to.
  redis.call("HDEL", request, "deadline_ms", "reason")
end
note_room_behind(f)
local mint, look = invite(k, r, now)
if f then
  leave_flow(f, 0)
end
save(k.meta, r)
return { redriven, r.state, mint, list_of(r), look, f and refused }
