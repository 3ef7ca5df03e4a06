-- seal: note that the load is complete.
--
--   loading -> open         request
--   loading -> done         request without a part left to finish
--
-- KEYS[1]  meta      HASH    counts, load cursor, tokens believed out
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
-- ARGV[1]  total     parts of the whole load
-- ARGV[2]  cursor    where the load stands at its end
--
-- Returns  state; tokens to push; their list; when to look again
-- Errors   UNKNOWN   no such request
--          SHORT     the server has another number of parts
--          EXISTS    the request was loaded from other content
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(1)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries
-- @include ending
-- @include window
-- @include flow
-- @include tree
-- @include handover

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], failed = KEYS[9],
  events = KEYS[10], flow = { unpack(KEYS, 11) },
}
local total, cursor = tonumber(ARGV[1]), ARGV[2]

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
-- A cancel has deleted the parts, so the load cannot be compared with them any more.
if r.state == "cancelled" then
  return { r.state, 0, list_of(r), 0 }
end
if r.total ~= total then
  return redis.error_reply("SHORT the server has " .. r.total .. " parts, not " .. total)
end
if redis.call("HGET", k.meta, "cursor") ~= cursor then
  return redis.error_reply("EXISTS the request was loaded from other content")
end
-- A request may fail while it is loading. Its load still comes to its end, and is sealed once.
local sealed = redis.call("HGET", k.meta, "sealed")
if sealed then
  return { r.state, 0, list_of(r), 0 }
end

local now = now_ms()
local f, refused_flow = enter_flow(k, r, now)
if refused_flow then
  return refused_flow
end
put(r, "sealed", 1)
if r.state == "loading" then
  put(r, "state", "open")
end
count_down(k, r, now, 1)
note_room_behind(f)
local mint, look = invite(k, r, now)
local others = f and leave_flow(f, 0)
save(k.meta, r)
return { r.state, mint, list_of(r), look, others or nil }
