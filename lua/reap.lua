-- reap: take back what holders left whose lease has expired.
--
--   running -> retry        parts, at the front, each to be handed out alone
--   running -> failed       a part that has cost too many workers
--
-- KEYS[1]  meta      HASH    state, counts, policy, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
-- KEYS[6]  holders   HASH    call number and running part of each lease
-- KEYS[7]  tries     HASH    part number, what went wrong with it
-- KEYS[8]  partial   HASH    part number, outcomes so far
-- KEYS[9]  failed    HASH    part number, what was given up
-- KEYS[10] events    channel the end is published there
--
-- ARGV[1]  limit     leases to reap at most
-- ARGV[2]  failure   what to keep of a part that is given up as poison
--
-- Returns  leases reaped; parts taken back; state; tokens to push; their list; when to look
--          again
-- Errors   UNKNOWN   no such request
-- Cost     O(limit * parts held)
-- Flags    allow-oom

-- @include clock
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries
-- @include ending
-- @include giveup

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], failed = KEYS[9], events = KEYS[10],
}
local limit, failure = tonumber(ARGV[1]), ARGV[2]

local r = load_request(k.meta)
if not r then
  return unknown()
end
local now = now_ms()

-- Which of the parts ran when the holder died: the one it last said, or the only one it had.
local function running_of(numbers, said)
  if #numbers == 1 then
    return numbers[1]
  end
  for _, number in ipairs(numbers) do
    if number == said then
      return number
    end
  end
  return nil
end

local expired = redis.call("ZRANGEBYSCORE", k.leases, "-inf", now, "LIMIT", 0, limit)
local reaped, taken = 0, 0
for _, holder in ipairs(expired) do
  local said = redis.call("HGET", k.holders, holder .. "#")
  local numbers = end_lease(k, holder)
  local running = running_of(numbers, said)
  reaped, taken = reaped + 1, taken + #numbers
  for _, number in ipairs(numbers) do
    if number == running then
      charge_crash(k, r, now, number, failure)
    else
      local t = read_tries(redis.call("HGET", k.tries, number))
      t.alone = 1
      write_tries(k.tries, number, t)
    end
  end
end
local mint, look = invite(k, r, now)
save(k.meta, r)
return { reaped, taken, r.state, mint, list_of(r), look }
