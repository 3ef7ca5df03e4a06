-- append: add a run of parts and move the load cursor, in one step.
--
--   (absent) -> waiting     parts
--
-- KEYS[1]  meta      HASH    counts, load cursor, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part, its id is the part's number
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
-- KEYS[6+] next      meta of the next stage of a flow, for its window
--
-- ARGV[1]  first     number of the first part given
-- ARGV[2]  after     load cursor that the parts were cut at: where the load must stand now
-- ARGV[3]  cursor    where the load stands after the last part given; opaque
-- ARGV[4]  records   in all parts given
-- ARGV[5+] entries   payload, about, payload, about; about begins with the records in it
--
-- Returns  parts so far; load cursor; tokens to push; their list; when to look again
-- Errors   UNKNOWN   no such request
--          ENDED     the request takes no more parts
--          SHORT     the parts given do not follow those that are there
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(parts given)
-- Flags    none

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include window

local k = { meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  next = { unpack(KEYS, 6) } }
local first, after, cursor, records = tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(k.meta, r, k.next)
if refused_flow then
  return refused_flow
end
local last = first + (#ARGV - 4) / 2 - 1
local stands = redis.call("HGET", k.meta, "cursor") or ""
-- The same call again, perhaps long after the first: nothing changes. If the call is another
-- loader's, which cuts parts of other sizes, it changes nothing either.
if last < r.total or (last == r.total and cursor == stands) then
  return { r.total, stands, 0, list_of(r), 0 }
end
if r.state ~= "loading" then
  return redis.error_reply("ENDED the request is " .. r.state .. " and takes no more parts")
end
if first ~= r.total + 1 then
  return redis.error_reply("SHORT the next part is " .. r.total + 1 .. ", not " .. first)
end
-- Two loaders may have cut the same number of parts, up to different places.
if after ~= stands then
  return redis.error_reply("SHORT the load stands at " .. stands .. ", not at " .. after)
end

local bytes = 0
for i = 5, #ARGV, 2 do
  local payload = ARGV[i]
  -- XADD completes the number n to the id n-0. That costs less than building the text.
  redis.call("XADD", k.parts, first + (i - 5) / 2, ARGV[i + 1], payload)
  bytes = bytes + #payload
end
redis.call("INCRBY", k.left, last - r.total)
put(r, "total", last)
put(r, "bytes", r.bytes + bytes)
put(r, "cursor", cursor)
redis.call("HINCRBY", k.meta, "records", records)
note_room(k, r, k.next)
local mint, look = invite(k, r, now_ms())
save(k.meta, r)
return { last, cursor, mint, list_of(r), look }
