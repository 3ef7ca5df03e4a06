-- Handing parts to a holder: due retries first, then new parts.
local READ_AT_ONCE = 32

-- Spend the request's rate on one part.
local function spend(r, now, entry)
  local units = 1
  if r.unit == "records" then
    units = tonumber(string.match(entry[2][1], "^%d+")) or 1
  end
  put(r, "rate_at_ms", math.max(r.rate_at_ms, now) + units * r.rate_ms)
end

-- Which due parts to hand out after those chosen already: a part that is to run alone comes alone.
local function choose(k, due, already)
  local texts = redis.call("HMGET", k.tries, unpack(due))
  local chosen = {}
  for i, number in ipairs(due) do
    local alone = read_tries(texts[i]).alone == 1
    if alone and already + i > 1 then
      return chosen, true
    end
    chosen[i] = number
    if alone then
      return chosen, true
    end
  end
  return chosen, false
end

-- What is known of the trouble of these entries: number, tries, partial, number, ...
local function troubles_of(k, entries)
  local troubles = {}
  for _, entry in ipairs(entries) do
    local number = number_of(entry[1])
    local text = redis.call("HGET", k.tries, number)
    local partial = redis.call("HGET", k.partial, number)
    if text or partial then
      troubles[#troubles + 1] = number
      troubles[#troubles + 1] = tries_text(read_tries(text))
      troubles[#troubles + 1] = partial or ""
    end
  end
  return troubles
end

-- Due retries as stream entries, and whether to stop there.
local function hand_retries(k, now, holder, n, already)
  local due = {}
  for _, number in ipairs(redis.call("ZRANGEBYSCORE", k.retry, "-inf", now, "LIMIT", 0, n)) do
    if string.match(number, "^[1-9]%d*$") and #number <= 16 then
      due[#due + 1] = number
    else
      -- No script of ours put that there, and XCLAIM would refuse all of them for it.
      redis.call("ZREM", k.retry, number)
    end
  end
  if #due == 0 then
    return {}, false
  end
  local chosen, stop = choose(k, due, already)
  if #chosen == 0 then
    return {}, stop
  end
  local entries = redis.call("XCLAIM", k.parts, "w", holder, 0, unpack(chosen))
  -- Also those XCLAIM did not return: they were finished meanwhile.
  redis.call("ZREM", k.retry, unpack(chosen))
  return entries, stop
end

-- Those of the entries that are parts of the request. They are numbered without a gap, so the
-- last one tells whether all are. What somebody else added to the stream is acknowledged and
-- stays there until the end; the next audit reports how many there were.
local function only_ours(k, r, entries)
  local last = r.delivered + #entries
  if last <= r.total and entries[#entries][1] == string.format("%d-0", last) then
    return entries
  end
  local ours, strays = {}, 0
  for _, entry in ipairs(entries) do
    local number = tonumber(string.match(entry[1], "^(%d+)%-0$"))
    if number and number <= r.total and #entry[2] == 2 then
      ours[#ours + 1] = entry
    else
      redis.call("XACK", k.parts, "w", entry[1])
      strays = strays + 1
    end
  end
  if strays > 0 then
    put(r, "strays", (tonumber(redis.call("HGET", k.meta, "strays")) or 0) + strays)
  end
  return ours
end

-- New parts, in reads of a few so that large parts stop at max_bytes. Returns lists of entries.
local function hand_new(k, r, holder, n, max_bytes)
  local lists, got, bytes, reads = {}, 0, 0, 0
  while got < n and bytes < max_bytes and r.delivered < r.total and reads < MOST_HELD do
    reads = reads + 1
    local count = math.min(n - got, READ_AT_ONCE)
    if got > 0 then
      count = math.min(count, math.max(1, math.floor((max_bytes - bytes) * got / bytes)))
    elseif max_bytes < r.bytes then
      count = math.min(count, math.max(1, math.floor(max_bytes * r.total / r.bytes)))
    end
    local reply = redis.call("XREADGROUP", "GROUP", "w", holder, "COUNT", count, "STREAMS", k.parts, ">")
    if not reply then
      break
    end
    local entries = only_ours(k, r, reply[1][2])
    for _, entry in ipairs(entries) do
      bytes = bytes + #entry[2][2]
    end
    lists[#lists + 1] = entries
    got = got + #entries
    put(r, "delivered", r.delivered + #entries)
  end
  return lists, got
end

-- Under a rate parts are handed out one by one, while the rate allows.
local function hand_by_rate(k, r, now, holder, n)
  local lists, retried, got, stop = {}, {}, 0, false
  while got < n and not stop and blocked_until(r) <= now do
    local entries
    entries, stop = hand_retries(k, now, holder, 1, got)
    if entries[1] then
      retried[#retried + 1] = entries[1]
    elseif not stop then
      entries = hand_new(k, r, holder, 1, 1)[1] or {}
    end
    if not entries[1] then
      break
    end
    spend(r, now, entries[1])
    lists[#lists + 1] = entries
    got = got + 1
  end
  return lists, troubles_of(k, retried), got
end

-- Returns lists of stream entries, the troubles of those that had any, and how many there are.
local function hand(k, r, now, holder, n, max_bytes)
  n = math.min(n, MOST_HELD)
  if r.rate_ms > 0 then
    return hand_by_rate(k, r, now, holder, n)
  end
  local entries, stop = hand_retries(k, now, holder, n, 0)
  local lists, got = {}, 0
  if not stop then
    lists, got = hand_new(k, r, holder, n - #entries, max_bytes)
  end
  if #entries > 0 then
    table.insert(lists, 1, entries)
  end
  return lists, troubles_of(k, entries), got + #entries
end

-- Everything pending under a holder, for a call that is repeated because its reply was lost.
local function hand_again(k, holder)
  local reply = redis.call("XREADGROUP", "GROUP", "w", holder, "COUNT", MOST_HELD, "STREAMS", k.parts, 0)
  return { reply[1][2] }, troubles_of(k, reply[1][2])
end
