-- Forgets final groups beyond the retention. args: keep (of each state), max_age_s (0: no limit), until_exported (keep
-- durable groups until they were exported), count (maximum per state). Returns the number of groups.
local age_s = args.max_age_s
local time, forgotten = now(), 0
for _, state in ipairs({'durable', 'filtered', 'expired', 'reissued'}) do
  local surplus = redis.call('ZCARD', key(state)) - args.keep
  local found = (surplus > 0 or age_s > 0) and redis.call('ZRANGE', key(state), 0, args.count - 1, 'WITHSCORES') or {}
  local ids, last = {}, nil
  for i = 1, #found, 2 do
    local id, score = found[i], found[i + 1]
    if surplus <= 0 then
      local over_at = state == 'durable' and field_of(id, 'durable_at') or score
      if age_s <= 0 or time - tonumber(over_at) <= age_s then break end
    end
    if state == 'durable' and args.until_exported and not field_of(id, 'exported') then break end
    -- The record goes to the next ticket, with the events (issue.lua).
    if state == 'reissued' and redis.call('EXISTS', key('events:' .. id)) == 1 then break end
    if state == 'durable' then last = tonumber(score) end
    ids[#ids + 1] = id
    surplus = surplus - 1
  end
  forget(state, ids, last)
  forgotten = forgotten + #ids
end
return forgotten
