-- handback: give back parts that were not started; the lease goes on.
--
--   running -> retry        parts, at the front
--
-- KEYS[1]  meta      HASH    state, limit, counts, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[4]  retry     ZSET    part number, scored by when it may run again
-- KEYS[5]  holders   HASH    call number and running part of each lease
-- KEYS[6+] next      meta of the next stage of a flow, for its window
--
-- ARGV[1]  holder
-- ARGV[2]  call      number of this call under the lease; kept when it is repeated
-- ARGV[3+] numbers   parts struck from the slot's queue before this call was sent
--
-- Returns  ok, lost, late or the state of an ended request; tokens to push; their list;
--          when to look again
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(parts held)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include window

local k = { meta = KEYS[1], parts = KEYS[2], leases = KEYS[3], retry = KEYS[4], holders = KEYS[5],
  next = { unpack(KEYS, 6) } }
local holder, call = ARGV[1], tonumber(ARGV[2])
local struck = {}
for i = 3, #ARGV do
  struck[ARGV[i]] = true
end

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(k.meta, r, k.next)
if refused_flow then
  return refused_flow
end
local refused = refusal(k, r, holder, call)
if refused then
  return refused
end

note_call(k, r, holder, call)
local given = {}
for _, number in ipairs(held(k.parts, holder)) do
  if struck[number] then
    given[#given + 1] = number
  end
end
park(k, given)
note_room(k, r, k.next)
local mint, look = invite(k, r, now_ms())
save(k.meta, r)
return { is_live(r) and "ok" or r.state, mint, list_of(r), look }
