-- append: add a run of parts and move the load cursor, in one step.
--
--   (absent) -> waiting     parts
--
-- KEYS[1]  meta      HASH    counts, load cursor, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part, its id is the part's number
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
--
-- ARGV[1]  first     number of the first part given
-- ARGV[2]  cursor    where the load stands after the last part given; opaque
-- ARGV[3]  records   in all parts given
-- ARGV[4+] entries   payload, about, payload, about; about begins with the records in it
--
-- Returns  parts so far; load cursor; tokens to push; their list; when to look again
-- Errors   UNKNOWN   no such request
--          ENDED     the request takes no more parts
--          SHORT     the parts given do not follow those that are there
--          NEWER     a later version of streamq made the request
-- Cost     O(parts given)
-- Flags    none

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens

local k = { meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5] }
local first, cursor, records = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local last = first + (#ARGV - 3) / 2 - 1
-- The same call again, perhaps long after the first: nothing changes.
if last <= r.total then
  return { r.total, redis.call("HGET", k.meta, "cursor"), 0, list_of(r), 0 }
end
if r.state ~= "loading" then
  return redis.error_reply("ENDED the request is " .. r.state .. " and takes no more parts")
end
if first ~= r.total + 1 then
  return redis.error_reply("SHORT the next part is " .. r.total + 1 .. ", not " .. first)
end

local bytes = 0
for i = 4, #ARGV, 2 do
  local payload = ARGV[i]
  -- XADD completes the number n to the id n-0. That costs less than building the text.
  redis.call("XADD", k.parts, first + (i - 4) / 2, ARGV[i + 1], payload)
  bytes = bytes + #payload
end
redis.call("INCRBY", k.left, last - r.total)
put(r, "total", last)
put(r, "bytes", r.bytes + bytes)
put(r, "cursor", cursor)
redis.call("HINCRBY", k.meta, "records", records)
local mint, look = invite(k, r, now_ms())
save(k.meta, r)
return { last, cursor, mint, list_of(r), look }
