-- A stage of a flow, and those that it hands over to. Everything that a script changes in other
-- stages is noted in one table `f`, and written by leave_flow().

-- Returns the stage that the facts describe, with the keys of its neighbours (`RequestKeys._flow`).
-- Returns nil if the keys are those of a flow of another shape.
local function read_facts(k, r, now, facts)
  local kind, feeds, own, join, grouped, barrier, stages, window, window_bytes, marks =
    string.match(facts, "^(%a+) (%a+) (%d+) (%d+) (%d) (%d+) (%d+) (%d+) (%d+) ?(%a*)$")
  local keys = k.flow
  if not kind then
    return nil
  end
  local f = {
    k = k, r = r, now = now, kind = kind, feeds = feeds, own = tonumber(own),
    grouped = grouped == "1", stages = tonumber(stages),
    window = tonumber(window), window_bytes = tonumber(window_bytes),
    groups = keys[1], kids = keys[2], got = keys[3], results = keys[4],
    loaded = {}, fields = {}, downs = {}, order = {}, added = 0,
  }
  local at = 4 + f.stages
  if feeds == "parts" then
    f.next = { number = f.own + 1, parts = keys[at + 1], leases = keys[at + 2], retry = keys[at + 3] }
    at = at + 3
  end
  local function far(number)
    local s = {
      number = tonumber(number), parts = keys[at + 1], leases = keys[at + 2], retry = keys[at + 3],
      failed = keys[at + 4], tries = keys[at + 5], got = keys[at + 6],
    }
    at = at + 6
    return s, s.got and string.find(s.got, ":" .. number .. ":got", 1, true)
  end
  local is_right = true
  if join ~= "0" then
    f.join, is_right = far(join)
  end
  if barrier ~= "0" and is_right then
    f.barrier, is_right = far(barrier)
  end
  if marks ~= "" then
    f.items, at = keys[at + 1], at + 1
  end
  if marks == "trace" then
    f.trace, at = keys[at + 1], at + 1
  end
  return is_right and at == #keys and f or nil
end

-- Returns the key of a stage's meta.
local function meta_of(f, number)
  return f.k.flow[4 + number]
end

-- What adding parts to another stage needs, and its window. It is there if it has a total.
local OF_STAGE = {
  "total", "bytes", "records", "done", "failed", "out", "weight", "limit", "window", "window_bytes",
}

-- Returns another stage: read once, and written by leave_flow(). It has the fields of OF_STAGE.
local function stage_at(f, number)
  if number == f.own then
    return f.r
  end
  local s = f.loaded[number]
  if not s then
    local values = redis.call("HMGET", meta_of(f, number), unpack(OF_STAGE))
    if not values[1] then
      return nil
    end
    s = { changes = {} }
    for i = 1, #OF_STAGE do
      s[OF_STAGE[i]] = tonumber(values[i]) or 0
    end
    f.loaded[number] = s
  end
  return s
end

-- Returns the same with the other fields of a request.
local function whole_stage(f, number)
  local s = stage_at(f, number)
  if s and not s.state then
    for field, value in pairs(load_request(meta_of(f, number)) or {}) do
      s[field] = s[field] or value
    end
  end
  return s
end

-- Returns the origin of an entry: what its name says behind the @, or its number in stage 1.
local function origin_of(about, number)
  return string.match(about, "@(.*)$") or number
end

-- Runs a given-up part of a join or reduce again, under its number.
local function redrive_part(f, s, number)
  local stage = stage_at(f, s.number)
  redis.call("XCLAIM", s.parts, "w", PARKED, 0, number, "FORCE", "JUSTID")
  redis.call("ZADD", s.retry, number, number)
  local t = read_tries(redis.call("HGET", s.tries, number))
  t.alone = t.crashes > 0 and 1 or 0
  t.errors, t.crashes = 0, 0
  t.run = tonumber(redis.call("HGET", meta_of(f, 1), "runs")) or 0
  write_tries(s.tries, number, t)
  if s.number == f.own then
    load_more(f.k.meta, stage)
  end
  put(stage, "failed", stage.failed - 1)
  if s.number == f.own then
    put(stage, "records_failed", stage.records_failed - t.records)
  else
    redis.call("HINCRBY", meta_of(f, s.number), "records_failed", -t.records)
  end
  s.is_touched = true
  f.added = f.added + 1
end

-- Begins a script of a stage: reads what it is, and refuses if the caller knows another shape.
-- Returns nothing for a plain request.
local function begin_flow(k, r, now)
  if r.protocol < FLOW then
    return nil, nil
  end
  local f = read_facts(k, r, now, redis.call("HGET", k.meta, "facts") or "")
  if not f then
    return nil, redis.error_reply("FLOW " .. (redis.call("HGET", k.meta, "shape") or ""))
  end
  return f, nil
end

-- Returns the most parts that may be unfinished in a stage, for its window in parts and in bytes.
local function window_of(s)
  if s.window_bytes > 0 and s.bytes > 0 then
    return math.min(s.window, s.window_bytes * s.total / s.bytes)
  end
  return s.window
end

-- Adds to the reply what the caller pushes for another stage: place, queue, tokens, list, when to
-- look again.
local function tell(f, number, stage, reply, mint, look)
  local meta = meta_of(f, number)
  local id, suffix = string.match(meta, "{r:(.-)}:(%d*):?meta$")
  local n = #reply
  reply[n + 1] = suffix == "" and id or id .. "/" .. suffix
  reply[n + 2] = redis.call("HGET", meta, "queue")
  reply[n + 3], reply[n + 4], reply[n + 5] = mint, list_of(stage), look
end

-- Invites workers to a stage that parts were added to, unless the stage behind it has no room.
local function tokens_for(f, s, reply)
  local stage = stage_at(f, s.number)
  -- As many tokens are out as there may be. Who uses one up asks for others.
  if stage.out >= math.min(weight_of(stage), stage.limit) then
    return
  end
  stage = whole_stage(f, s.number)
  local believed = stage.out
  local mint, look = invite(s, stage, f.now)
  if mint > 0 and s.number < f.stages then
    local room = room_for(s, stage, stage_at(f, s.number + 1))
    if room and room < mint then
      mint = room
      put(stage, "out", believed + mint)
    end
  end
  if mint > 0 or look > 0 then
    tell(f, s.number, stage, reply, mint, look)
  end
end

-- When what is unfinished in this stage falls through half of its window, the stage before gets a
-- token: its parts may have waited for the room (rule F15). A part of a spread may need more room
-- than half of the window. So the stage before gets a token also when nothing is left here.
local function wake_previous(f, before, reply)
  local r = f.r
  if not r.failed then
    load_more(f.k.meta, r)
  end
  local after = r.total - r.done - r.failed
  local half = window_of({ window = f.window, window_bytes = f.window_bytes, bytes = r.bytes,
    total = r.total }) / 2
  local has_room = (before > half and after <= half) or (before > 0 and after <= 0)
  if has_room and is_live(r) and r.paused == 0 then
    local previous = whole_stage(f, f.own - 1)
    put(previous, "out", previous.out + 1)
    tell(f, f.own - 1, previous, reply, 1, 0)
  end
end

-- Notes how many parts of this stage may start, for the window of the next; nil: a plain request.
local function note_room_behind(f)
  if f and f.own < f.stages then
    f.r.room = room_for(f.k, f.r, stage_at(f, f.own + 1))
  end
end

-- The flow has ended in a later stage: a janitor of the request comes at once if it owes callbacks.
local function tell_debt(f, reply)
  local found = redis.call("HMGET", meta_of(f, 1), "owes", "settled", "redrives", "handler", "level")
  if (tonumber(found[1]) or 0) > 0 and (tonumber(found[2]) or 0) <= (tonumber(found[3]) or 0) then
    tell(f, 1, { handler = found[4] or "", level = tonumber(found[5]) or 0 }, reply, 0, f.now)
  end
end

-- Ends a script of a stage: writes what was noted of other stages, and returns the tokens for them.
-- `before` is how many parts of this stage were unfinished when the script began.
local function leave_flow(f, before)
  local reply = {}
  if is_live(f.r) then
    for _, s in pairs({ f.next, f.join, f.barrier }) do
      if s.is_touched then
        tokens_for(f, s, reply)
      end
    end
    if f.window > 0 and f.own > 1 then
      wake_previous(f, before, reply)
    end
  elseif f.own > 1 then
    tell_debt(f, reply)
  end
  for number, stage in pairs(f.loaded) do
    if stage.added then
      put(stage, "total", stage.total)
      put(stage, "bytes", stage.bytes)
      put(stage, "records", stage.records + stage.added)
    end
    save(meta_of(f, number), stage)
  end
  return reply
end
