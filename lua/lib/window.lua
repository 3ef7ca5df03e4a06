-- Windows of a flow. A stage starts no part for which the next stage has no room: what is
-- unfinished there and what is in hand here must stay below the next stage's window. It is worked
-- out afresh each time, so that no count can be wrong.

-- Returns the refusal for a caller that does not know that this is a stage of a flow; nil if it
-- does, or if it is none.
local function untold(meta, r, given)
  if r.protocol < FLOW or #given > 0 then
    return nil
  end
  return redis.error_reply("FLOW " .. (redis.call("HGET", meta, "shape") or ""))
end

-- Has load_request() read how many parts failed, too: windows need it in each call. The protocol
-- stays the last field.
local function load_failed_too()
  table.insert(FIELDS, #FIELDS, "failed")
end

-- Returns how many parts may start for the window of the next stage `n`; nil: any number. A part
-- counts as often as a part has had children so far. Where nothing is on its way, one may start.
local function room_for(k, r, n)
  if n.window == 0 then
    return nil
  end
  if not r.failed then
    load_more(k.meta, r)
  end
  local in_hand = r.delivered - r.done - r.failed
  if not is_smooth(k, r) then
    in_hand = in_hand - redis.call("ZCARD", k.retry)
  end
  local window, each = n.window, 1
  if n.window_bytes > 0 and n.bytes > 0 then
    window = math.min(window, n.window_bytes * n.total / n.bytes)
  end
  if r.done > 0 and n.total > r.done then
    each = n.total / r.done
  end
  local backlog = n.total - n.done - n.failed
  local room = math.floor((window - backlog) / each - in_hand)
  if backlog <= 0 and in_hand <= 0 then
    return math.max(1, room)
  end
  return math.max(0, room)
end

-- Notes in `r` how many parts may start for the next stage, whose meta is `given[1]`.
local function note_room(k, r, given)
  if not given[1] then
    return
  end
  local found = redis.call("HMGET", given[1], "window", "window_bytes", "total", "bytes", "done",
    "failed")
  r.room = room_for(k, r, {
    window = tonumber(found[1]) or 0, window_bytes = tonumber(found[2]) or 0,
    total = tonumber(found[3]) or 0, bytes = tonumber(found[4]) or 0,
    done = tonumber(found[5]) or 0, failed = tonumber(found[6]) or 0,
  })
end
