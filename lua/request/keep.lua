-- keep: keep what the records of a running part came to, and say which of them run next.
--
--   running -> running      part: its next attempt runs only the records without an outcome
--
-- KEYS[1]  meta      HASH    state
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[4]  retry     ZSET    part number, scored by when it may run again
-- KEYS[5]  holders   HASH    call number and running part of each lease
-- KEYS[6]  partial   HASH    part number, outcomes so far; number@, which records run or took long
-- KEYS[7]  tries     HASH    part number, what went wrong with it
--
-- ARGV[1]  holder
-- ARGV[2]  call      number of this call under the lease; kept when it is repeated
-- ARGV[3]  created   when the request was created whose part it is, as claim told it
-- ARGV[4]  number    of the part
-- ARGV[5]  partial   outcomes so far; "" leaves those that are stored
-- ARGV[6]  mark      which records are about to run; "" removes what is stored
--
-- Returns  ok, lost, late or the state of a request done or cancelled
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
-- Cost     O(1)
-- Flags    allow-oom

-- @include version
-- @include request
-- @include tokens
-- @include lease
-- @include tries
-- @include marks

local k = {
  meta = KEYS[1], parts = KEYS[2], leases = KEYS[3], retry = KEYS[4], holders = KEYS[5],
  partial = KEYS[6], tries = KEYS[7],
}
local holder, call, created, number = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local partial, mark = ARGV[5], ARGV[6]

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end

-- Returns whether nobody has taken the part since its lease was lost. Then its outcomes count, as
-- results do. After a redrive they may be of the run before, which has delivered some of them. In a
-- flow the number may be that of another item since a failover (rule F6).
local function is_free()
  return created == r.created_ms and r.protocol < FLOW
    and redis.call("ZSCORE", k.retry, number)
    and not has_delivered(k.parts, number, read_tries(redis.call("HGET", k.tries, number)))
end

local refused = refusal(k, r, holder, call)
local is_repeat = refused and refused[1] == "late"
  and call == tonumber(redis.call("HGET", k.holders, holder))
if refused and not is_repeat then
  if refused[1] == "lost" and partial ~= "" and is_free() then
    redis.call("HSET", k.partial, number, partial)
  end
  return refused[1]
end
if #redis.call("XPENDING", k.parts, "w", number, number, 1, holder) == 0 then
  return "late"
end
if is_repeat then
  return "ok"
end

note_call(k, r, holder, call)
if partial ~= "" then
  redis.call("HSET", k.partial, number, partial)
end
set_mark(k.partial, number, mark)
return "ok"
