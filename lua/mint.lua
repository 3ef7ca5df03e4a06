-- mint: push tokens of a request, and register it or its next look.
--
--   (changes the queue's lists and indexes)
--
-- KEYS[1]  tokens    LIST  request ids of one handler and level, pushed left, popped right
-- KEYS[2]  due       ZSET  request id, scored by when to look at it again (ms)
-- KEYS[3]  open      ZSET  requests not finished, scored by submission (ms)
-- KEYS[4]  closed    ZSET  finished requests, scored by when they may be purged (ms)
--
-- ARGV[1]  request_id
-- ARGV[2]  count     tokens
-- ARGV[3]  mode      push: so many more; ensure: only those missing from so many in the list;
--                    drop: none; those are taken out that requests left which have ended
-- ARGV[4]  look_ms   moment to look at the request again, or 0
-- ARGV[5]  register  no; yes: it is about to open; again: it is about to be redriven
-- ARGV[6]  believed  to ensure: so many of them are believed out
--
-- Returns  tokens pushed; to drop: tokens taken out
-- Errors   none
-- Cost     O(count); to ensure: O(length of the list), in the mean no more than READ_AT_MOST; to
--          drop: O(READ_AT_MOST)
-- Flags    allow-oom

-- @include clock
-- @include most_out

-- Tokens that one look reads, on average.
local READ_AT_MOST = 4096
-- Tokens that one command puts back.
local PUSH_AT_ONCE = 1000
-- A little longer than processes that saw a request end drop its tokens (LEFT_OVER_S).
local LEFT_OVER_MS = 250

local tokens, due, open, closed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local request_id, count, mode = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local look_ms, register, believed = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])

-- A list is read through to count one request's tokens. When it is long, only now and then: all
-- the looks at all the requests in it would take the server more time than the work. Meanwhile
-- what is believed counts: a token that was lost is missed until then, and nothing else is.
local function is_skipped()
  local times = math.ceil(redis.call("LLEN", tokens) / READ_AT_MOST)
  return times > 1 and now_ms() % times > 0
end

-- Take out tokens of requests that are not open any more, of all that have some among those that are
-- taken next. However long the list is, it costs the same; what is behind them is for another time.
local function drop_ended()
  local is_open, kept = {}, {}
  local read = redis.call("LRANGE", tokens, -READ_AT_MOST, -1)
  for _, token in ipairs(read) do
    if is_open[token] == nil then
      is_open[token] = redis.call("ZSCORE", open, token) and true
    end
    if is_open[token] then
      kept[#kept + 1] = token
    end
  end
  if #kept < #read then
    redis.call("LTRIM", tokens, 0, -#read - 1)
    for first = 1, #kept, PUSH_AT_ONCE do
      redis.call("RPUSH", tokens, unpack(kept, first, math.min(#kept, first + PUSH_AT_ONCE - 1)))
    end
  end
  return #read - #kept
end

if register ~= "no" then
  local now = now_ms()
  local score = register == "again" and tonumber(redis.call("ZSCORE", open, request_id))
  if score then
    -- A new score, so that whoever saw the request ended before this cannot close it.
    redis.call("ZADD", open, math.max(now, score + 1), request_id)
  else
    redis.call("ZADD", open, "NX", now, request_id)
  end
  redis.call("ZREM", closed, request_id)
  if redis.call("ZADD", due, "NX", now, request_id) == 0 and register == "again" then
    -- Its tokens may be taken for those that are left over from before: look just after that.
    redis.call("ZADD", due, "LT", now + LEFT_OVER_MS, request_id)
  end
end
if look_ms > 0 then
  redis.call("ZADD", due, "LT", look_ms, request_id)
end
if mode == "drop" then
  return drop_ended()
end
local is_counted = mode ~= "push" and not is_skipped()
if mode == "ensure" and not is_counted then
  count = count - believed
elseif mode == "ensure" then
  local found = #redis.call("LPOS", tokens, request_id, "COUNT", 2 * MOST_OUT)
  if found > MOST_OUT then
    -- More turns than others of the list have: too many were minted once.
    redis.call("LREM", tokens, found - MOST_OUT, request_id)
  end
  count = count - found
end
-- Nobody needs more of one request; a count that was spoilt is not to keep the server busy.
count = math.min(count, MOST_OUT)
for _ = 1, count do
  redis.call("LPUSH", tokens, request_id)
end
return math.max(0, count)
