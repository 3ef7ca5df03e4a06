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
-- @include marks

local k = {
  meta = KEYS[1], parts = KEYS[2], leases = KEYS[3], retry = KEYS[4], holders = KEYS[5],
  partial = KEYS[6],
}
local holder, call, created, number = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local partial, mark = ARGV[5], ARGV[6]

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused = refusal(k, r, holder, call)
if refused then
  -- A lease is lost, and nobody has taken the part since: its outcomes count, as results do. Not in
  -- a flow: after a failover the number may be that of another item (rule F6).
  local is_free = refused[1] == "lost" and r.protocol < FLOW and created == r.created_ms
    and redis.call("ZSCORE", k.retry, number)
  if is_free and partial ~= "" then
    redis.call("HSET", k.partial, number, partial)
  end
  return refused[1]
end
if #redis.call("XPENDING", k.parts, "w", number, number, 1, holder) == 0 then
  return "late"
end

note_call(k, r, holder, call)
if partial ~= "" then
  redis.call("HSET", k.partial, number, partial)
end
set_mark(k.partial, number, mark)
return "ok"
