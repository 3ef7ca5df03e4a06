-- mint: push tokens of a request, and register it or its next look.
--
--   (changes the queue's lists and indexes)
--
-- KEYS[1]  tokens    LIST  request ids of one handler and level, pushed left, popped right
-- KEYS[2]  due       ZSET  request id, scored by when to look at it again (ms)
-- KEYS[3]  open      ZSET  requests not finished, scored by submission (ms)
-- KEYS[4]  closed    ZSET  finished requests, scored by when they may be purged (ms)
-- KEYS[5]  used      ZSET  lists that tokens came into, scored by when the first did (ms); and
--                          HANDLER:told, scored by when news of the handler were last pushed (ms)
-- KEYS[6]  news      LIST  lists of the handler that came into use lately; has a TTL
--
-- ARGV[1]  request_id  "" to tell again of a list
-- ARGV[2]  count     tokens
-- ARGV[3]  mode      push: so many more; ensure: only those missing from so many in the list;
--                    drop: push none, remove tokens of requests that have ended, and make due
--                    the requests that neither open nor closed has;
--                    forget: push none, remove the list from used if it is empty;
--                    heard: push none, remove the news of the list
-- ARGV[4]  look_ms   moment to look at the request again, or 0
-- ARGV[5]  register  no; yes: it is about to open; again: it is about to be redriven
-- ARGV[6]  believed  to ensure: how many tokens of the request are believed out
-- ARGV[7]  to        the list, as it is called in used and news: HANDLER:LL
-- ARGV[8+] weight    to ensure: how many tokens of the request may be out, if that is not 8
--
-- Returns  tokens pushed; to drop: tokens removed
-- Errors   none
-- Cost     O(count); to ensure: O(length of the list), in the mean no more than READ_AT_MOST; to
--          drop: O(READ_AT_MOST)
-- Flags    allow-oom

-- @include clock
-- @include most_out

-- A look reads at most so many tokens, on average.
local READ_AT_MOST = 4096
-- One RPUSH puts back at most so many tokens.
local PUSH_AT_ONCE = 1000
-- For 200 ms after a process saw a request end, it drops the request's tokens (LEFT_OVER_S). This
-- is a little longer.
local LEFT_OVER_MS = 250
-- After this time every process knows a list: it reads `used` when it takes and read it 0.5 s ago,
-- and a wait that began just before ends 10 s later (READ_EVERY_S, BLOCK_S).
local KNOWN_AFTER_MS = 30000
-- When a list comes into use, so many processes that wait are told of it at once.
local TOLD_AT_ONCE = 1000
-- Later tokens of the list bring one piece of news more, at most this often. A process that has
-- just learned of the list and saw tokens there asks for one at once (no request_id).
local TELL_EVERY_MS = 1000
-- No request has a larger weight. A damaged count must not keep the server busy.
local MOST_WEIGHT = 64

local tokens, due, open, closed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local used, news = KEYS[5], KEYS[6]
local request_id, count, mode = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local look_ms, register, believed = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local to, weight = ARGV[7], unpack(ARGV, 8)

-- To count one request's tokens, the whole list is read. A long list is read only now and then:
-- with a look at each request in it, reading would take the server longer than the work. At other
-- looks the belief counts, so only a lost token is missed until the list is read.
local function is_skipped()
  local times = math.ceil(redis.call("LLEN", tokens) / READ_AT_MOST)
  return times > 1 and now_ms() % times > 0
end

-- Processes wait at the lists that they know to be in use, and at `news`. A process that takes a
-- piece of news reads `used`. When a list comes into use, every process that waits gets a piece;
-- what is left is removed by the first process that takes a second one (heard). A process that was
-- just about to wait may have missed its piece, so for 30 s later tokens bring one now and then.
-- If `used` or `news` has another type, nothing is told: the next process that reads it renames it
-- (aside), and tokens are pushed all the same.
local function is_spoilt(key, type)
  local found = redis.call("TYPE", key).ok
  return found ~= type and found ~= "none"
end

-- Returns how many pieces of news are to lie in the list.
local function news_wanted(now)
  local since = tonumber(redis.call("ZSCORE", used, to))
  -- A moment that is still to come is of a clock that was wrong.
  if not since or since > now then
    redis.call("ZADD", used, now, to)
    return TOLD_AT_ONCE
  end
  if now - since > KNOWN_AFTER_MS then
    return 0
  end
  local told = to:sub(1, -3) .. "told"
  local elapsed = now - (tonumber(redis.call("ZSCORE", used, told)) or 0)
  if request_id ~= "" and elapsed >= 0 and elapsed < TELL_EVERY_MS then
    return 0
  end
  redis.call("ZADD", used, now, told)
  return 1
end

local function tell()
  if is_spoilt(used, "zset") then
    return
  end
  local wanted = news_wanted(now_ms())
  if wanted == 0 or is_spoilt(news, "list") then
    return
  end
  local pieces = {}
  for piece = 1, wanted - redis.call("LLEN", news) do
    pieces[piece] = to
  end
  if #pieces > 0 then
    redis.call("LPUSH", news, unpack(pieces))
    redis.call("PEXPIRE", news, KNOWN_AFTER_MS)
  end
end

-- Returns whether the request is open. A request that is in neither index may still run: a failover
-- has lost its registration. Its tokens are removed here, so it becomes due: tick registers it, and
-- the look pushes tokens or forgets it.
local function is_still_open(id)
  if redis.call("ZSCORE", open, id) then
    return true
  end
  if not redis.call("ZSCORE", closed, id) then
    redis.call("ZADD", due, "NX", now_ms(), id)
  end
  return false
end

-- Removes tokens of requests that are not open any more from the 4,096 that are taken next, and
-- returns their number. So the cost does not depend on the length of the list; later calls read the
-- rest.
local function drop_ended()
  local is_open, kept = {}, {}
  local read = redis.call("LRANGE", tokens, -READ_AT_MOST, -1)
  for _, token in ipairs(read) do
    if is_open[token] == nil then
      is_open[token] = is_still_open(token)
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
    -- With a new score, a caller of close that saw the request ended before this can no longer
    -- close it.
    redis.call("ZADD", open, math.max(now, score + 1), request_id)
  else
    redis.call("ZADD", open, "NX", now, request_id)
  end
  redis.call("ZREM", closed, request_id)
  if redis.call("ZADD", due, "NX", now, request_id) == 0 and register == "again" then
    -- Processes that saw the request end may drop its new tokens as left over. Look just after
    -- that.
    redis.call("ZADD", due, "LT", now + LEFT_OVER_MS, request_id)
  end
end
if look_ms > 0 then
  redis.call("ZADD", due, "LT", look_ms, request_id)
end
if is_spoilt(tokens, "list") then
  -- Somebody else made another of the list, and what follows is refused. A process that waits at
  -- the list puts it aside: so tell of it, for only lists in use are waited at.
  tell()
end
if mode == "forget" then
  if redis.call("LLEN", tokens) == 0 then
    redis.call("ZREM", used, to)
  end
  return 0
end
if mode == "heard" then
  redis.call("LREM", news, 0, to)
  return 0
end
if mode == "drop" then
  return drop_ended()
end
local most = math.min(tonumber(weight) or MOST_OUT, MOST_WEIGHT)
local is_counted = mode ~= "push" and not is_skipped()
if mode == "ensure" and not is_counted then
  count = count - believed
elseif mode == "ensure" then
  local found = #redis.call("LPOS", tokens, request_id, "COUNT", 2 * most)
  if found > most then
    -- The request has more tokens than may be out, and so more turns than others: drop the surplus.
    redis.call("LREM", tokens, found - most, request_id)
  end
  count = count - found
end
count = math.min(count, MOST_WEIGHT)
for _ = 1, count do
  redis.call("LPUSH", tokens, request_id)
end
if count > 0 or (mode == "ensure" and redis.call("LLEN", tokens) > 0) then
  tell()
end
return math.max(0, count)
