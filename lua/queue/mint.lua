-- mint: push tokens of a request, and register it or its next look.
--
--   (changes the queue's lists and indexes)
--
-- KEYS[1]  tokens    LIST  request ids of one handler and level, pushed left, popped right
-- KEYS[2]  due       ZSET  request id, scored by when to look at it again (ms)
-- KEYS[3]  open      ZSET  requests not finished, scored by submission (ms)
-- KEYS[4]  closed    ZSET  finished requests, scored by when they may be purged (ms)
-- KEYS[5]  used      ZSET  lists that tokens came into, scored by when the first did (ms)
-- KEYS[6]  news      LIST  lists of the handler that came into use lately; has a TTL
--
-- ARGV[1]  request_id
-- ARGV[2]  count     tokens
-- ARGV[3]  mode      push: so many more; ensure: only those missing from so many in the list;
--                    drop: none; those are taken out that requests left which have ended;
--                    forget: none, and a list that is empty is in use no more
-- ARGV[4]  look_ms   moment to look at the request again, or 0
-- ARGV[5]  register  no; yes: it is about to open; again: it is about to be redriven
-- ARGV[6]  believed  to ensure: so many of them are believed out
-- ARGV[7]  to        the list, as it is called in used and news: HANDLER:LL
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
-- After so long every process knows of a list: it reads what is in use every 10 s, and a wait
-- that was begun just before ends 10 s later (READ_EVERY_S, BLOCK_S).
local KNOWN_AFTER_MS = 30000
-- Whoever waits takes news at once. They gather only while nobody does.
local MOST_NEWS = 64

local tokens, due, open, closed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local used, news = KEYS[5], KEYS[6]
local request_id, count, mode = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local look_ms, register, believed = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local to = ARGV[7]

-- A list is read through to count one request's tokens. When it is long, only now and then: all
-- the looks at all the requests in it would take the server more time than the work. Meanwhile
-- what is believed counts: a token that was lost is missed until then, and nothing else is.
local function is_skipped()
  local times = math.ceil(redis.call("LLEN", tokens) / READ_AT_MOST)
  return times > 1 and now_ms() % times > 0
end

-- Processes wait at the lists they know to be in use, and at the news. So while a list may be
-- new to some of them, news of it are pushed with each token: who takes them reads what is in use.
-- A key that somebody else made another of is left to those who read it: tokens are pushed.
local function is_spoilt(key, type)
  local found = redis.call("TYPE", key).ok
  return found ~= type and found ~= "none"
end

local function tell(pushed)
  if is_spoilt(used, "zset") then
    return
  end
  local now = now_ms()
  local since = tonumber(redis.call("ZSCORE", used, to))
  if not since then
    since = now
    redis.call("ZADD", used, now, to)
  end
  if now - since > KNOWN_AFTER_MS or is_spoilt(news, "list") then
    return
  end
  local there = redis.call("LLEN", news)
  -- At least one, also of tokens that were there before: who was told of them may have died.
  for _ = 1, math.min(math.max(pushed, 1 - there), MOST_NEWS - there) do
    redis.call("LPUSH", news, to)
  end
  redis.call("PEXPIRE", news, KNOWN_AFTER_MS)
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
if is_spoilt(tokens, "list") then
  -- Somebody else made another of the list, and what follows is refused. A process that waits at
  -- the list puts it aside: so tell of it, for only lists in use are waited at.
  tell(1)
end
if mode == "forget" then
  if redis.call("LLEN", tokens) == 0 then
    redis.call("ZREM", used, to)
  end
  return 0
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
if count > 0 or (mode == "ensure" and redis.call("LLEN", tokens) > 0) then
  tell(count)
end
return math.max(0, count)
