-- Handing parts to a holder: due retries first, then new parts.
local READ_AT_ONCE = 64
-- Payloads that are read together are returned as one string, unless they have more bytes than
-- this: then the copy costs more than it saves.
local MOST_SHARED = 65536

-- Collects the parts to hand out, as a few long strings: a nested table in a reply costs the server
-- more than the rest of a part's way.
local function new_basket()
  return { ids = {}, abouts = {}, sizes = {}, chunks = {}, bytes = 0 }
end

local function fill(basket, entries)
  local ids, abouts, sizes = basket.ids, basket.abouts, basket.sizes
  local n, payloads, bytes = #ids, {}, 0
  for i = 1, #entries do
    local fields = entries[i][2]
    local payload = fields[2]
    ids[n + i], abouts[n + i], sizes[n + i] = entries[i][1], fields[1], #payload
    payloads[i] = payload
    bytes = bytes + #payload
  end
  basket.bytes = basket.bytes + bytes
  local chunks = basket.chunks
  if bytes <= MOST_SHARED then
    chunks[#chunks + 1] = table.concat(payloads)
  else
    for i = 1, #payloads do
      chunks[#chunks + 1] = payloads[i]
    end
  end
end

-- Returns the end of a reply: ids, a line about each part, the sizes of the payloads, the payloads.
local function contents(basket)
  local count = #basket.ids
  if count == 0 then
    return
  end
  local sizes = struct.pack("<" .. string.rep("I4", count), unpack(basket.sizes))
  return table.concat(basket.ids, " "), table.concat(basket.abouts, "\n"), sizes, unpack(basket.chunks)
end

-- Charges the request's rate with the start of one part.
local function spend(r, now, about)
  local units = 1
  if r.unit == "records" then
    units = tonumber(string.match(about, "^%d+")) or 1
  end
  put(r, "rate_at_ms", math.max(rate_at(r, now), now) + units * r.rate_ms)
  put(r, "rate_charge_ms", units * r.rate_ms)
end

-- Returns which due parts to hand out after those chosen already, and whether to stop there. A part
-- that must run alone is handed out alone.
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

-- Returns what is stored about earlier trouble of these entries: number, tries, partial, mark,
-- number, ... Behind the tries of a part that killed workers is how many it may kill.
local function troubles_of(k, entries)
  local troubles = {}
  for _, entry in ipairs(entries) do
    local number = number_of(entry[1])
    local text = redis.call("HGET", k.tries, number)
    local kept = redis.call("HMGET", k.partial, number, number .. "@")
    if text or kept[1] or kept[2] then
      local t = read_tries(text)
      local poison = t.crashes > 0 and " " .. (redis.call("HGET", k.meta, "poison") or "") or ""
      local n = #troubles
      troubles[n + 1], troubles[n + 2] = number, tries_text(t) .. poison
      troubles[n + 3], troubles[n + 4] = kept[1] or "", kept[2] or ""
    end
  end
  return troubles
end

-- Returns members of `retry` that are due, up to `n`, but for those that a canary holds back.
local function due_retries(k, r, now, n)
  if not holds_back(r) then
    return redis.call("ZRANGEBYSCORE", k.retry, "-inf", now, "LIMIT", 0, n)
  end
  local due = redis.call("ZRANGEBYSCORE", k.retry, "-inf", r.ceiling, "LIMIT", 0, n)
  local later = redis.call("ZRANGEBYSCORE", k.retry, "(" .. r.total, now, "LIMIT", 0, n - #due)
  for i = 1, #later do
    due[#due + 1] = later[i]
  end
  return due
end

-- Returns due retries as stream entries, and whether to stop there.
local function hand_retries(k, r, now, holder, n, already)
  if is_smooth(k, r) then
    return {}, false
  end
  local due = {}
  for _, number in ipairs(due_retries(k, r, now, n)) do
    if string.match(number, "^[1-9]%d*$") and #number <= 16 then
      due[#due + 1] = number
    else
      -- No script of ours writes such a member, and XCLAIM would refuse all numbers because of it.
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
  -- This removes also numbers that XCLAIM did not return: those parts were finished meanwhile.
  redis.call("ZREM", k.retry, unpack(chosen))
  return entries, stop
end

-- Returns those of the entries that are parts of the request. Parts are numbered without a gap, so
-- the id of the last entry tells whether all of them are. Entries that another program added to the
-- stream are acknowledged and stay there until the end; the next audit reports how many there were.
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

-- Hands out new parts. They are read a few at a time, so that large parts stop at max_bytes.
local function hand_new(k, r, holder, n, max_bytes, basket)
  local before, got, bytes, reads, last = basket.bytes, 0, 0, 0, last_startable(r)
  while got < n and bytes < max_bytes and r.delivered < last and reads < MOST_HELD do
    reads = reads + 1
    local count = math.min(n - got, READ_AT_ONCE)
    if r.ceiling > 0 then
      count = math.min(count, last - r.delivered)
    end
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
    fill(basket, entries)
    got, bytes = got + #entries, basket.bytes - before
    put(r, "delivered", r.delivered + #entries)
  end
end

-- With a rate, hands out parts one by one, while the rate allows.
local function hand_by_rate(k, r, now, holder, n, basket)
  local retried, stop = {}, false
  while #basket.ids < n and not stop and blocked_until(r, now) <= now do
    local before, entries = #basket.ids, nil
    entries, stop = hand_retries(k, r, now, holder, 1, before)
    if entries[1] then
      retried[#retried + 1] = entries[1]
      fill(basket, entries)
    elseif not stop then
      hand_new(k, r, holder, 1, 1, basket)
    end
    if #basket.ids == before then
      break
    end
    spend(r, now, basket.abouts[before + 1])
  end
  return basket, troubles_of(k, retried)
end

-- Hands out parts. Returns a basket, and the troubles of the parts in it that had any.
local function hand(k, r, now, holder, n, max_bytes)
  local basket = new_basket()
  n = math.min(n, MOST_HELD, r.room or MOST_HELD)
  if r.rate_ms > 0 then
    return hand_by_rate(k, r, now, holder, n, basket)
  end
  -- There may be very many retries (refuse), and their sizes are not known: the mean is.
  local fit = r.bytes > 0 and math.max(1, math.floor(max_bytes * r.total / r.bytes)) or n
  local entries, stop = hand_retries(k, r, now, holder, math.min(n, fit), 0)
  if #entries > 0 then
    fill(basket, entries)
    stop = stop or basket.bytes >= max_bytes or #entries >= fit
  end
  if not stop then
    hand_new(k, r, holder, n - #entries, max_bytes, basket)
  end
  return basket, troubles_of(k, entries)
end

-- Notes that parts were handed out for which the next stage of a flow has room.
local function take_room(r, basket)
  if r.room then
    r.room = math.max(0, r.room - #basket.ids)
  end
end

-- Returns everything pending under a holder, for a call that is repeated because its reply was
-- lost.
local function hand_again(k, holder)
  local reply = redis.call("XREADGROUP", "GROUP", "w", holder, "COUNT", MOST_HELD, "STREAMS", k.parts, 0)
  local basket = new_basket()
  fill(basket, reply[1][2])
  return basket, troubles_of(k, reply[1][2])
end
