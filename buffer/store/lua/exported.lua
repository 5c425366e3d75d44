-- Marks durable groups as written to a file, or forgets them. args: ids, forget. Returns how many were still durable:
-- others were forgotten in the meantime, or returned to ready because their steps were undone.
local marked = 0
for _, id in ipairs(args.ids) do
  if state_of(id) == 'durable' then
    marked = marked + 1
    if args.forget then
      forget('durable', {id}, tonumber(redis.call('ZSCORE', key('durable'), id)))
    else
      redis.call('HSET', key('about:' .. id), 'exported', 1)
    end
  end
end
return marked
